"""The versions of Relight and of its format, where every room can read them."""

VERSION = "0.2.0"
FORMAT = 1
