"use strict";
const WIDTH = 360, HEIGHT = 150, LEFT = 46, RIGHT = 6, TOP = 8, BOTTOM = 18, SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function short(value) {
  const size = Math.abs(value);
  return size >= 1e4 || (size > 0 && size < 1e-2) ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

// Draws the curves of all runs into a figure.
function draw(figure, curves, names) {
  const plot = figure.querySelector(".plot"), points = curves.flat();
  plot.replaceChildren();
  if (!points.length) return;
  const steps = points.map((p) => p[0]), values = points.map((p) => p[1]);
  const first = Math.min(...steps), last = Math.max(...steps);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { const pad = Math.abs(low) / 10 || 1; low -= pad; high += pad; }
  const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (last > first ? (step - first) / (last - first) : 0.5);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Curve of ${figure.dataset.metric}` });
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  svg.append(element("text", { x: LEFT, y: HEIGHT - 3 }, `step ${first}`));
  svg.append(element("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, String(last)));
  curves.forEach((curve, i) => {
    if (curve.length === 1) svg.append(element("circle", { class: `fill${i}`, r: 3, cx: x(curve[0][0]), cy: y(curve[0][1]) }));
    const path = curve.map((p, k) => `${k ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    svg.append(element("path", { class: `line${i}`, d: path }));
  });
  plot.append(svg);
  showValues(plot, svg, curves, names, (px) => first + (px - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first));
}

// Shows the values at the step under the pointer.
function showValues(plot, svg, curves, names, stepAt) {
  const tip = document.createElement("div");
  tip.className = "tip";
  svg.addEventListener("pointermove", (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const step = stepAt(place.x), lines = [];
    curves.forEach((curve, i) => {
      if (!curve.length) return;
      const near = curve.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
      lines.push(`${curves.length > 1 ? names[i] + ", " : ""}step ${near[0]}: ${short(near[1])}`);
    });
    tip.textContent = lines.join(" | ");
    plot.append(tip);
  });
  svg.addEventListener("pointerleave", () => tip.remove());
}

function drawAll() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const drawVisible = (root) => root.querySelectorAll(".chart").forEach((figure) => {
    const folded = figure.closest("details");
    if (!folded || folded.open) draw(figure, data.curves[figure.dataset.metric], data.names);
  });
  drawVisible(document);
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => drawVisible(details)));
}

// Replaces what is shown if the server has something new; what the reader has opened stays open.
async function refresh(state) {
  try {
    const answer = await fetch(location.href, { headers: state.tag ? { "If-None-Match": state.tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      state.tag = answer.headers.get("ETag");
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      for (const details of document.querySelectorAll("details")) {
        const same = fresh.querySelector("#" + details.id);
        if (same) same.open = details.open;
      }
      document.querySelector("main").replaceWith(fresh);
      drawAll();
    } else if (answer.status !== 304) throw new Error(String(answer.status));
    const status = document.getElementById("status");
    status.textContent = status.dataset.state;
  } catch {
    document.getElementById("status").textContent = "the server does not answer";
  }
  setTimeout(refresh, 1000, state);
}

drawAll();
if (document.body.hasAttribute("data-live")) refresh({ tag: null });
