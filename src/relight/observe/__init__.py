"""What happened, told once: events to Python logging and to whoever subscribed; counters of them. May import: ``errors``."""

from relight.observe.events import EVENTS, Event, be_modest, counters, emit, subscribe

__all__ = ["EVENTS", "Event", "be_modest", "counters", "emit", "subscribe"]
