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

// The running mean of a curve with its running standard deviation: [step, mean, deviation] for each point. The weight of
// a point falls by the factor `weight` with each point after it.
function smoothed(curve, weight) {
  let total = 0, sum = 0, squares = 0;
  return curve.map(([step, value]) => {
    total = weight * total + 1;
    sum = weight * sum + value;
    squares = weight * squares + value * value;
    const mean = sum / total;
    return [step, mean, Math.sqrt(Math.max(0, squares / total - mean * mean))];
  });
}

// Draws the curves of the runs that are shown into a figure.
function draw(figure, all, names, view) {
  const plot = figure.querySelector(".plot"), curves = all.map((curve, i) => (view.hidden.has(i) ? [] : curve));
  const points = curves.flat();
  plot.replaceChildren();
  if (!points.length) return;
  const steps = points.map((p) => p[0]), values = points.map((p) => p[1]);
  const first = Math.min(...steps), last = Math.max(...steps);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { const pad = Math.abs(low) / 10 || 1; low -= pad; high += pad; }
  const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (last > first ? (step - first) / (last - first) : 0.5);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (Math.min(high, Math.max(low, value)) - low) / (high - low);
  const line = (pairs) => pairs.map(([step, value], k) => `${k ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": `Curve of ${figure.dataset.metric}. Arrow keys show its values.` });
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  svg.append(element("text", { x: LEFT, y: HEIGHT - 3 }, `step ${first}`));
  svg.append(element("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, String(last)));
  curves.forEach((curve, i) => {
    if (!curve.length) return;
    if (curve.length === 1) svg.append(element("circle", { class: `fill${i}`, r: 3, cx: x(curve[0][0]), cy: y(curve[0][1]) }));
    if (view.smoothing > 0) {
      const means = smoothed(curve, view.smoothing);
      const border = [...means.map(([step, mean, width]) => [step, mean + width]), ...means.map(([step, mean, width]) => [step, mean - width]).reverse()];
      svg.append(element("path", { class: `band fill${i}`, d: line(border) }));
      svg.append(element("path", { class: `raw line${i}`, d: line(curve) }));
      svg.append(element("path", { class: `line${i}`, d: line(means) }));
    } else svg.append(element("path", { class: `line${i}`, d: line(curve) }));
  });
  plot.append(svg);
  showValues(plot, svg, curves, names, [first, last]);
}

// Shows the values at the step under the pointer, or at the one that the arrow keys have reached.
function showValues(plot, svg, curves, names, [first, last]) {
  const tip = document.createElement("div"), steps = [...new Set(curves.flat().map((p) => p[0]))].sort((a, b) => a - b);
  let place = steps.length;
  tip.className = "tip";
  tip.setAttribute("role", "status");
  plot.append(tip);
  tip.hidden = true;
  const show = (step) => {
    const lines = [];
    curves.forEach((curve, i) => {
      if (!curve.length) return;
      const near = curve.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
      lines.push(`${curves.length > 1 ? names[i] + ", " : ""}step ${near[0]}: ${short(near[1])}`);
    });
    tip.textContent = lines.join(" | ");
    tip.hidden = false;
  };
  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    show(first + (at.x - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first));
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  svg.addEventListener("blur", () => { tip.hidden = true; });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    place = Math.min(steps.length - 1, Math.max(0, place + move));
    show(steps[place]);
  });
}

// The values of a token, as its title has them: [name, value] of each quantity.
function valuesOf(token) {
  return token.title.split(", ").map((part) => [part.slice(0, part.lastIndexOf(" ")), part.slice(part.lastIndexOf(" ") + 1)]);
}

// Shows the values of the token that the arrow keys have reached, or that was clicked on.
function showToken(tokens, token) {
  const all = [...tokens.children];
  tokens.querySelector(".here")?.classList.remove("here");
  token.classList.add("here");
  token.scrollIntoView({ block: "nearest" });
  tokens.nextElementSibling.textContent = `token ${all.indexOf(token) + 1} of ${all.length}, ${JSON.stringify(token.textContent)}: ${token.title}`;
}

document.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move || !event.target.matches(".tokens[tabindex]")) return;
  event.preventDefault();
  const all = [...event.target.children], place = all.findIndex((token) => token.classList.contains("here"));
  showToken(event.target, all[Math.min(all.length - 1, Math.max(0, place < 0 ? 0 : place + move))]);
});
document.addEventListener("click", (event) => {
  if (event.target.matches(".tokens[tabindex] > span")) showToken(event.target.parentElement, event.target);
});

// Fills a table of the values of tokens, when it is opened.
function fillTable(details) {
  if (!details.open || details.querySelector("table")) return;
  const tokens = [...details.parentElement.querySelectorAll(".tokens > span")], table = document.createElement("table");
  const names = [...new Set(tokens.flatMap((token) => valuesOf(token).map(([name]) => name)))];
  const row = (tag, cells) => {
    const line = table.insertRow();
    cells.forEach((text, i) => {
      const cell = document.createElement(tag);
      if (i !== 1) cell.className = "n";
      if (tag === "th") cell.scope = "col";
      cell.textContent = text;
      line.append(cell);
    });
  };
  row("th", ["number", "token", ...names]);
  tokens.forEach((token, i) => {
    const values = Object.fromEntries(valuesOf(token));
    row("td", [i + 1, JSON.stringify(token.textContent), ...names.map((name) => values[name] ?? "-")]);
  });
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.append(table);
  details.append(scroll);
}

// What the reader has chosen in the controls, which stay when the page is replaced.
function chosen() {
  const hidden = [...document.querySelectorAll("[data-run]:not(:checked)")].map((box) => Number(box.dataset.run));
  return {
    smoothing: Number(document.getElementById("smoothing").value),
    hidden: new Set(hidden),
    words: document.getElementById("words").value.trim().toLowerCase(),
    onlyCutOff: document.getElementById("cut-off").checked,
  };
}

// Hides the completions that the reader does not want to see.
function filter(view) {
  let numShown = 0;
  document.querySelectorAll("#completions article").forEach((article) => {
    const isWanted = (!view.words || article.textContent.toLowerCase().includes(view.words)) && (!view.onlyCutOff || "cutOff" in article.dataset);
    article.hidden = !isWanted;
    numShown += isWanted;
  });
  const none = document.getElementById("none-found");
  if (none) none.hidden = numShown > 0;
}

// Draws the curves in a part of the page that are not folded.
function drawAll(root = document) {
  const data = JSON.parse(document.getElementById("data").textContent), view = chosen();
  root.querySelectorAll(".chart").forEach((figure) => {
    const folded = figure.closest("details");
    if (!folded || folded.open) draw(figure, data.curves[figure.dataset.metric], data.names, view);
  });
  const color = document.getElementById("color");
  document.body.dataset.color = color.value;
  color.parentElement.hidden = !document.querySelector(".tokens[tabindex]");
  root.querySelectorAll(".as-table").forEach(fillTable);
  if (root instanceof Element && root.matches(".as-table")) fillTable(root);
  filter(view);
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
      const metric = document.activeElement.closest(".chart")?.dataset.metric;
      const tokens = document.activeElement.closest(".tokens"), place = [...(tokens?.children ?? [])].findIndex((token) => token.classList.contains("here"));
      document.querySelector("main").replaceWith(fresh);
      drawAll();
      if (metric) fresh.querySelector(`.chart[data-metric="${CSS.escape(metric)}"] svg`)?.focus({ preventScroll: true });
      const same = tokens && fresh.querySelector(`#${tokens.parentElement.id} > .tokens`);
      same?.focus({ preventScroll: true });
      if (same?.children[place]) showToken(same, same.children[place]);
    } else if (answer.status !== 304) throw new Error(String(answer.status));
    const status = document.getElementById("status");
    status.textContent = status.dataset.state;
  } catch {
    document.getElementById("status").textContent = "the server does not answer";
  }
  setTimeout(refresh, 1000, state);
}

const controls = document.querySelector(".controls");
controls.hidden = false;
controls.addEventListener("input", () => drawAll());
document.addEventListener("toggle", (event) => drawAll(event.target), { capture: true });
controls.addEventListener("submit", (event) => event.preventDefault());
drawAll();
if (document.body.hasAttribute("data-live")) refresh({ tag: null });
