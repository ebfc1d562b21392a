// The page as a whole: headlines, the shared view, the selected event, tables.

class Page {
  constructor(data) {
    this.narrow = window.innerWidth < 640;
    this.view = { begin: 0, end: 1 };
    this.stepper = new Stepper(data.schedules, data.world);
    this.timelines = data.runs.map((run) => new Timeline(run, this.view, this));
    this.tip = document.getElementById("tip");
    this.detail = document.getElementById("detail");
    this.hint = this.detail.firstElementChild;
    document.getElementById("headlines").append(...data.runs.map(headline));
    document.getElementById("advice").append(...advice(data.runs));
    document.getElementById("tables").append(...tables(data.runs));
    document.getElementById("legend").append(...legend(data.legend));
    document.getElementById("runs").append(...this.timelines.map((timeline) => timeline.root));
    for (const timeline of this.timelines) listenTo(timeline, this);
    this.listen();
    const first = this.timelines[0].steps, counts = this.timelines.map((timeline) => timeline.steps.length);
    this.goToStep(usualStep(first, Math.max(1, Math.min(...counts))));
    this.oneStep();
    this.resize();
  }

  listen() {
    const actions = {
      "previous-step": () => this.otherStep(-1), "next-step": () => this.otherStep(1), "zoom-in": () => this.zoom(0.6),
      "zoom-out": () => this.zoom(1 / 0.6), "one-step": () => this.oneStep(), everything: () => this.everything(),
    };
    for (const button of document.querySelectorAll("[data-do]")) {
      button.addEventListener("click", actions[button.dataset.do]);
    }
    new ResizeObserver(() => this.resize()).observe(document.getElementById("runs"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const timeline of this.timelines) [timeline.painter, timeline.small].forEach((painter) => painter.readColours());
      this.draw();
    });
  }

  resize() {
    this.narrow = window.innerWidth < 640;
    for (const timeline of this.timelines) timeline.resize();
    this.draw(true);
  }

  draw(now = false) {
    if (now) return this.timelines.forEach((timeline) => timeline.draw());
    this.frame = this.frame || requestAnimationFrame(() => {
      this.frame = 0;
      this.draw(true);
    });
    return undefined;
  }

  // ---- what is looked at --------------------------------------------------------------------------

  get longest() { return Math.max(...this.timelines.map((timeline) => timeline.run.end_ns)); }

  look(begin, end, anew = false) {
    const span = Math.min(1.1 * this.longest, Math.max(200, end - begin));
    this.view.begin = begin;
    this.view.end = begin + span;
    const count = this.stepCount;
    document.getElementById("step").textContent = count ? `${this.step + 1} of ${count}` : "no steps";
    for (const timeline of this.timelines) timeline.arrange(anew);
    this.draw();
  }

  pan(share) {
    const by = share * (this.view.end - this.view.begin);
    this.look(this.view.begin + by, this.view.end + by);
  }

  zoom(factor, around = (this.view.begin + this.view.end) / 2) {
    this.look(around + (this.view.begin - around) * factor, around + (this.view.end - around) * factor);
  }

  goTo(timeline, time) {
    const half = (this.view.end - this.view.begin) / 2;
    this.look(time - timeline.origin - half, time - timeline.origin + half);
  }

  everything() {
    const first = Math.min(...this.timelines.map((timeline) => -timeline.origin));
    const last = Math.max(...this.timelines.map((timeline) => timeline.run.end_ns - timeline.origin));
    this.look(first - (last - first) * 0.01, last + (last - first) * 0.01, true);
  }

  oneStep() {
    const span = Math.max(...this.timelines.map((timeline) => timeline.stepLength));
    this.look(-0.02 * span, 1.04 * span, true);
  }

  get stepCount() { return Math.max(...this.timelines.map((timeline) => timeline.steps.length)); }

  // All runs at the same step; one that has fewer stays at its last.
  goToStep(number) {
    this.step = Math.max(0, Math.min(this.stepCount - 1, number));
    for (const timeline of this.timelines) {
      timeline.step = Math.max(0, Math.min(timeline.steps.length - 1, this.step));
    }
  }

  otherStep(by) {
    this.goToStep(this.step + by);
    this.look(this.view.begin, this.view.end, true);
  }

  // ---- one event ------------------------------------------------------------------------------------

  point(timeline, found, event) {
    this.tip.hidden = !found;
    if (!found) return;
    const [title, ...lines] = describe(timeline, found);
    this.tip.replaceChildren(element("b", { textContent: title }), ...lines.map((line) => element("div", { textContent: line })));
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(window.innerWidth - box.width - 8, event.clientX + 14))}px`;
    const below = event.clientY + 18 + box.height < window.innerHeight;
    this.tip.style.top = `${below ? event.clientY + 18 : Math.max(4, event.clientY - box.height - 12)}px`;
  }

  describe(timeline, found) {
    if (!found) {
      this.detail.replaceChildren(this.hint);
      return;
    }
    const [title, ...lines] = describe(timeline, found);
    const zoom = element("button", { type: "button", textContent: "zoom to it" });
    zoom.addEventListener("click", () => KEYS.Enter(timeline, this));
    this.detail.replaceChildren(element("p", { className: "title", textContent: `rank ${found.band.rank}: ${title}` }),
      ...lines.map((line) => element("p", { textContent: line })), zoom);
    const label = timeline.labelOf(found.lane, found.index);
    if (label.moves) {
      const step = element("button", { type: "button", textContent: "its moves" });
      step.addEventListener("click", () => this.stepper.open(label.moves, label.b || 0));
      this.detail.append(step);
    }
  }
}

const PASSES = { F: "forward", B: "backward", I: "gradient of the input", W: "gradient of the weights" };

// An event in words: a title and lines.
function describe(timeline, { band, lane, index }) {
  const label = timeline.labelOf(lane, index), begin = lane.begin[index], end = lane.end[index];
  const step = timeline.steps.findLastIndex(([from]) => from <= begin);
  const when = step < 0 ? `at ${timeText(begin)}` : `at ${timeText(begin - timeline.steps[step][0])} of step ${step + 1}`;
  const lines = [lane.kind === "gradient" || lane.kind === "mark" ? when : `${timeText(end - begin)}, ${when}`];
  let title = label.n || "";
  if (label.pass) title = `${label.n}: ${PASSES[label.pass[1]]} of micro-batch ${label.pass[2]}, stage ${label.pass[0]}`;
  if (lane.kind === "operation" && label.peer >= 0) title += `${label.n === "recv" ? " from" : " to"} rank ${label.peer}`;
  if (lane.kind === "exposed") title = `exposed: the program waited in ${label.n}`;
  if (lane.kind === "wait") title = `waited for ${label.n}${label.peer >= 0 ? ` (rank ${label.peer})` : ""}`;
  if (lane.kind === "gradient") title = `gradient ready: ${label.n || `number ${lane.number[index]}`}`;
  if (lane.kind === "operation" || lane.kind === "wait") lines.push(`operation ${lane.number[index]}`);
  if (lane.kind === "bucket") {
    if (label.phase) title += `: ${label.phase}`;
    lines.push(`filling ${timeText(lane.ready[index] - begin)}, waiting to be sent ${timeText(lane.launch[index] - lane.ready[index])}, ` +
      `in flight ${timeText(end - lane.launch[index])}`);
    lines.push(`exposed ${timeText(lane.exposed[index])}`);
  }
  if (label.b) lines.push(bytesText(label.b) + (lane.kind === "operation" || lane.kind === "bucket" ? rate(label.b, end - (lane.launch ? lane.launch[index] : begin)) : ""));
  if (label.of) lines.push(label.of);
  if (label.path) lines.push(`path ${label.path}`);
  return [title, ...lines];
}

function rate(bytes, ns) { return ns > 0 ? `, ${short(bytes / ns * 1e3)} MB/s in flight` : ""; }

function headline(run) {
  const made = element("div", { className: "headline" });
  const title = element("h1");
  if (run.overlap === null) {
    title.textContent = run.headline;
  } else {
    title.append("exposed ", element("b", { textContent: `${run.exposed} of ${run.communication} ms` }),
      `${run.step_count ? " per step" : ""}, `, element("em", { textContent: `overlap ${run.overlap}` }));
  }
  const step = run.step === null ? "" : `, ${run.step_count} steps of ${run.step} ms`;
  const about = [`${run.world_size} ranks over ${run.network}${step}`, run.pipeline, run.about].filter(Boolean).join(" · ");
  made.append(title, element("p", {}, element("span", { className: "name", textContent: run.name }), ` · ${about}`));
  if (run.error) made.append(element("p", { className: "trouble", textContent: `The run ended with ${run.error}` }));
  if (run.dropped) made.append(element("p", { className: "trouble", textContent: `${run.dropped} oldest events are missing: the ring was full. dpcore.trace(capacity=...) keeps more.` }));
  return made;
}

function legend(texts) {
  return Object.entries(texts).map(([colour, text]) => {
    const sample = element("i");
    sample.style.background = `var(--${colour})`;
    return element("span", {}, sample, text);
  });
}

// The lines of `dpcore advise`: a cause, and below it what was seen, the gain and the change.
function advice(runs) {
  return runs.filter((run) => run.advice.length).map((run) => {
    const parts = [];
    for (const line of run.advice) {
      const [, word, rest] = line.match(/^ +(\S+) +(.*)$/) || [];
      if (!word) parts.push(element("p", { textContent: line }), element("dl"));
      else parts.at(-1).append(element("dt", { textContent: word }), element("dd", { textContent: rest }));
    }
    const name = runs.length > 1 ? `${run.name}: what to change` : "What to change";
    return element("div", {}, element("h2", { textContent: name }), ...parts);
  });
}

// A column of tables for each run.
function tables(runs) {
  return runs.map((run) => element("div", {}, ...run.tables.map(({ title, columns, texts, rows }) => {
    const cell = (kind) => (text, i) => element(kind, { textContent: text, className: texts.includes(i) ? "text" : "" });
    const head = element("tr", {}, ...columns.map(cell("th")));
    const lines = rows.map((row) => element("tr", {}, ...row.map(cell("td"))));
    const name = runs.length > 1 ? `${run.name}: ${title}` : title;
    return element("div", {}, element("h2", { textContent: name }),
      element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines))));
  })));
}

// The stepper alone, where there is no run.
function moves(data) {
  document.body.classList.add("moves-only");
  const stepper = new Stepper(data.schedules, data.world), { collective, algorithm, world } = stepper.parts;
  const title = element("h1");
  const name = () => { title.textContent = `${collective.value} by ${algorithm.value}, ${world.value} ranks`; };
  for (const choice of [collective, algorithm, world]) choice.addEventListener("change", name);
  name();
  document.getElementById("headlines").append(element("div", { className: "headline" }, title));
  return { stepper };
}

loadRuns().then((data) => {
  window.page = data.runs.length ? new Page(data) : moves(data);
  // The first frame, in milliseconds after the page was asked for.
  requestAnimationFrame(() => { document.body.dataset.ready = performance.now().toFixed(0); });
}).catch((problem) => {
  document.body.dataset.failed = String(problem);
  document.getElementById("runs").textContent = `The page could not be drawn: ${problem}`;
  throw problem;
});
