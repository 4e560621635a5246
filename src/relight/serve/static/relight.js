// Optional script of the pages: live refresh and charts that zoom. Everything else works without scripts.
"use strict";

function listen() {
  const live = document.getElementById("live");
  const state = document.getElementById("live-state");
  if (!live || !live.dataset.events || !window.EventSource) return;
  const source = new EventSource(live.dataset.events);
  let waiting = null;
  source.addEventListener("open", () => { if (state) { state.className = "live on"; state.textContent = "live"; } });
  source.addEventListener("error", () => { if (state) { state.className = "live"; state.textContent = "not live: reload to see new data"; } });
  source.addEventListener("changed", () => {
    if (waiting || document.querySelector("#live form :focus")) return; // a refresh would discard what the user is typing
    waiting = setTimeout(() => { waiting = null; htmx.trigger(document.getElementById("live"), "relight:changed"); }, 300);
  });
  window.addEventListener("pagehide", () => source.close());
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The rule of relight.units.compact_text, for the axes of charts.
function compact(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(4)}${letter}`;
  }
  return `${+value.toPrecision(4)}`;
}

const REFRESH_MS = 5000; // metrics of a chart are fetched again at most that often
const DOTS_MAX = 60; // a curve with fewer points shows each as a dot
const plots = new WeakMap();

// The points of one curve: given in the page, or fetched.
async function points(one) {
  if (one.x) return [one.x, one.y];
  const answer = await fetch(one.href);
  if (!answer.ok) throw new Error(`${answer.status}`);
  const got = await answer.json();
  return [one.per ? got.seconds.map((at) => (at - one.origin) / one.per) : got.steps, got.values];
}

async function columns(given) {
  const tables = await Promise.all(given.curves.map(points));
  const positive = (y) => (given.log ? y.map((value) => (value > 0 ? value : null)) : y);
  return uPlot.join(tables.map(([x, y]) => [x, positive(y)]));
}

function marks(u, given) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const one of given.marks) {
    const x = u.valToPos(one.x, "x", true);
    ctx.strokeStyle = ctx.fillStyle = colour(one.kind === "checkpoint" ? "--l1" : "--bad");
    ctx.beginPath();
    if (one.kind === "incident") {
      ctx.setLineDash([4, 4]);
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    } else {
      const foot = bbox.top + bbox.height;
      ctx.moveTo(x, foot - 12);
      ctx.lineTo(x + 6, foot);
      ctx.lineTo(x - 6, foot);
      ctx.fill();
    }
  }
  ctx.restore();
}

function options(state, width) {
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui", values: (u, at) => at.map((value) => (value === null ? "" : compact(value))) };
  const wide = (u, from, to) => { // a margin, or the first and last marks would be cut off
    const room = to > from ? (to - from) / 100 : Math.abs(from) / 100 || 1;
    return [from - room, to + room];
  };
  return {
    width,
    height: 240,
    scales: { x: { time: false, range: wide }, y: { distr: state.given.log ? 3 : 1 } },
    axes: [axis, { ...axis, size: (u, values) => 16 + 6.5 * Math.max(4, ...(values || []).map((text) => text.length)) }],
    series: [{ label: state.given.unit }, ...state.given.curves.map((one, i) => ({
      label: one.name, stroke: colour(`--l${i % 8}`), width: 1.5, spanGaps: true,
      points: { show: (u, n) => u.data[n].reduce((sum, y) => sum + (y !== null && y !== undefined), 0) <= DOTS_MAX, size: 6, fill: colour(`--l${i % 8}`) },
    }))],
    hooks: { draw: [(u) => marks(u, state.given)], setSelect: [(u) => { state.zoomed = state.zoomed || u.select.width > 0; }] },
    cursor: { drag: { x: true, y: false } },
    legend: { show: true },
  };
}

async function draw(place) {
  const known = plots.get(place);
  if (known && (known.busy || Date.now() - known.at < REFRESH_MS)) return;
  const state = known || { zoomed: false };
  state.busy = true;
  state.at = Date.now();
  state.given = JSON.parse(place.dataset.chart);
  plots.set(place, state);
  try {
    const data = await columns(state.given);
    if (!place.isConnected || !data[0].length) return;
    if (state.plot) {
      state.plot.setData(data, !state.zoomed);
      if (state.zoomed) state.plot.redraw();
      return;
    }
    place.replaceChildren();
    state.plot = new uPlot(options(state, place.clientWidth), data, place);
    state.plot.over.addEventListener("dblclick", () => { state.zoomed = false; });
    const sized = new ResizeObserver(() => {
      if (!place.isConnected) { sized.disconnect(); state.plot.destroy(); return; }
      if (place.clientWidth !== state.plot.width) state.plot.setSize({ width: place.clientWidth, height: 240 });
    });
    sized.observe(place);
  } catch (error) {
    // the server's picture stays
  } finally {
    state.busy = false;
  }
}

const near = window.IntersectionObserver && new IntersectionObserver((seen) => {
  for (const one of seen) if (one.isIntersecting) draw(one.target);
}, { rootMargin: "300px" });

function charts() {
  if (!window.uPlot || !near) return;
  document.querySelectorAll("[data-chart]").forEach((place) => { near.unobserve(place); near.observe(place); }); // calls back for visible ones
}

// A form of options applies at once: without scripts it has a button.
function applies() {
  document.querySelectorAll("form.options").forEach((form) => form.querySelectorAll("select").forEach((field) => {
    field.onchange = () => form.requestSubmit();
  }));
}

// On a narrow screen the style sheet stacks the cells of a row, each after its column's heading.
function headings() {
  document.querySelectorAll("main table").forEach((table) => {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    if (names.length) table.classList.add("stacks");
    table.querySelectorAll("tbody tr").forEach((row) => [...row.children].forEach((cell, i) => { if (names[i] && !cell.classList.contains("pick")) cell.dataset.heading = names[i]; }));
  });
}

// The badge is outside of the part that a refresh replaces.
function badge() {
  const count = document.getElementById("alerts")?.dataset.count || 0;
  const place = document.getElementById("badge");
  place.hidden = !+count;
  place.textContent = `${count} ${+count === 1 ? "alert" : "alerts"}`;
}

function refresh() {
  charts();
  applies();
  headings();
}

document.addEventListener("DOMContentLoaded", () => { listen(); refresh(); });
document.addEventListener("htmx:after:swap", () => { refresh(); badge(); });
