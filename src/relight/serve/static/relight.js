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

function chart(figure) {
  if (!window.uPlot || figure.querySelector(".uplot")) return;
  const given = JSON.parse(figure.dataset.chart);
  if (!given.x.length) return;
  const still = figure.querySelector("svg.picture");
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const marks = (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const one of given.marks) {
      const x = u.valToPos(one.x, "x", true);
      ctx.strokeStyle = ctx.fillStyle = colour(one.kind === "incident" ? "--bad" : "--l1");
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
  };
  const wide = (from, to) => { // a margin, or the first and last marks would be cut off
    const room = given.marks.length && to > from ? (to - from) / 100 : 0;
    return room ? [from - room, to + room] : [from, to];
  };
  const place = document.createElement("div");
  const options = {
    width: figure.clientWidth,
    height: Math.max(200, Math.min(320, figure.clientWidth * 0.3)),
    scales: { x: { time: false, range: (u, from, to) => wide(from, to) } },
    axes: [{ ...axis, values: (u, at) => at.map(compact) }, { ...axis, size: 58, values: (u, at) => at.map(compact) }],
    series: [{ label: given.unit }, ...given.curves.map((one, i) => ({ label: one.name, stroke: colour(`--l${i % 8}`), width: 1.6, spanGaps: false, points: { show: false } }))],
    hooks: { draw: [marks] },
    cursor: { drag: { x: true, y: false } },
  };
  figure.insertBefore(place, figure.firstChild);
  const made = new uPlot(options, [given.x, ...given.curves.map((one) => one.y)], place);
  if (still) still.remove();
  const sized = new ResizeObserver(() => {
    if (!place.isConnected) { sized.disconnect(); made.destroy(); return; }
    if (figure.clientWidth !== made.width) made.setSize({ width: figure.clientWidth, height: made.height });
  });
  sized.observe(figure);
}

function charts() {
  document.querySelectorAll("figure[data-chart]").forEach(chart);
}

document.addEventListener("DOMContentLoaded", () => { listen(); charts(); });
document.addEventListener("htmx:after:swap", charts);
