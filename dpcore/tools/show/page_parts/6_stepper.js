// One operation, move by move: as it ran, and as it would by the other algorithms.

const SVG = "http://www.w3.org/2000/svg";
const CELL_WIDTH = 74, CELL_HEIGHT = 34, COLUMN_GAP = 46, ROW_GAP = 14, LEFT = 66, TOP = 34;

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

class Stepper {
  constructor(schedules, shownFirst) {
    this.schedules = schedules;
    this.operation = { bytes: 0, ranks: 0 }; // the one that is shown, if it is one of the run
    this.step = 0;
    const find = (id) => document.getElementById(id);
    this.parts = { collective: find("collective"), algorithm: find("algorithm"), world: find("world"), text: find("move-text"),
      number: find("move-number"), drawing: find("moves"), play: find("move-play") };
    const { world, collective, algorithm } = this.parts;
    world.replaceChildren(...Object.keys(schedules).map((n) => new Option(n)));
    world.value = shownFirst;
    find("world-choice").hidden = world.options.length < 2;
    const forget = () => { this.operation = { bytes: 0, ranks: 0 }; };
    world.addEventListener("change", () => { forget(); this.chooseWorld(); });
    collective.addEventListener("change", () => { forget(); this.chooseCollective(); });
    algorithm.addEventListener("change", () => this.begin());
    find("move-back").addEventListener("click", () => this.go(this.step - 1));
    find("move-on").addEventListener("click", () => this.go(this.step + 1));
    this.parts.play.addEventListener("click", () => this.play());
    this.chooseWorld();
  }

  chooseWorld() {
    const { world, collective } = this.parts;
    const names = Object.keys(this.schedules[world.value]);
    collective.replaceChildren(...names.map((name) => new Option(name)));
    this.chooseCollective();
  }

  chooseCollective() {
    const { world, collective, algorithm } = this.parts;
    const entry = this.schedules[world.value][collective.value];
    algorithm.replaceChildren(...Object.entries(entry.algorithms).map(([name, plan]) =>
      new Option(plan.ran ? `${name} (ran)` : name, name)));
    algorithm.value = entry.first;
    this.begin();
  }

  // Shows what an operation of so many bytes ran.
  open([world, collective, name, ranks], bytes) {
    this.operation = { bytes, ranks };
    this.parts.world.value = world;
    this.chooseWorld();
    this.parts.collective.value = collective;
    this.chooseCollective();
    this.parts.algorithm.value = name;
    this.begin();
    document.getElementById("stepper").scrollIntoView({ behavior: "smooth", block: "start" });
  }

  begin() {
    const { world, collective, algorithm } = this.parts;
    this.world = Number(world.value);
    this.plan = this.schedules[world.value][collective.value].algorithms[algorithm.value];
    this.stop();
    this.go(0);
  }

  play() {
    if (this.timer) return this.stop();
    if (this.step >= this.plan.moves.length) this.go(0);
    this.parts.play.textContent = "pause";
    this.timer = setInterval(() => {
      if (this.step >= this.plan.moves.length) this.stop(); else this.go(this.step + 1);
    }, 1400);
    return undefined;
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.parts.play.textContent = "play";
  }

  // State `step` is drawn, with the moves that led to it.
  go(step) {
    this.step = Math.min(this.plan.moves.length, Math.max(0, step));
    this.parts.number.textContent = `step ${this.step} of ${this.plan.moves.length}`;
    this.parts.text.textContent = this.sentence();
    this.draw();
  }

  sentence() {
    const { bytes, ranks } = this.operation;
    const fewer = ranks > this.world ? ` Drawn for ${this.world} ranks, the operation had ${ranks}.` : "";
    const each = (bytes && !fewer ? ` A chunk is ${bytesText(bytes / this.plan.chunks)} of the ${bytesText(bytes)}.` : "") + fewer;
    if (this.step === 0) return `Before: every rank holds its own numbers.${each}`;
    const moves = this.plan.moves[this.step - 1];
    const told = moves.slice(0, 4).map(([from, to, chunk, adds]) =>
      `rank ${from} sends chunk ${chunk} to rank ${to}${adds ? ", which adds it" : ""}`).join("; ");
    const more = moves.length > 4 ? `; and ${moves.length - 4} more at the same time` : "";
    const end = this.step === this.plan.moves.length ? " Done." : "";
    return `${told}${more}.${end}${each}`;
  }

  x(rank) { return LEFT + rank * (CELL_WIDTH + COLUMN_GAP); }
  y(chunk) { return TOP + chunk * (CELL_HEIGHT + ROW_GAP); }

  draw() {
    const { drawing } = this.parts, width = this.x(this.world), height = this.y(this.plan.chunks);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("width", width);
    drawing.setAttribute("height", height);
    drawing.setAttribute("aria-label", this.sentence());
    drawing.replaceChildren(this.arrowHeads());
    for (let rank = 0; rank < this.world; rank++) {
      drawing.append(svg("text", { x: this.x(rank) + CELL_WIDTH / 2, y: 14, class: "rank" }, `rank ${rank}`));
    }
    for (let chunk = 0; chunk < this.plan.chunks; chunk++) {
      drawing.append(svg("text", { x: 28, y: this.y(chunk) + CELL_HEIGHT / 2, class: "chunk" }, `chunk ${chunk}`));
    }
    const before = new Map(this.step ? this.plan.states[this.step - 1].map(([r, c, v]) => [`${r} ${c}`, v]) : []);
    for (const [rank, chunk, value, ranks] of this.plan.states[this.step]) {
      this.drawCell(rank, chunk, value, ranks, this.step > 0 && before.get(`${rank} ${chunk}`) !== value);
    }
    const moves = this.step ? this.plan.moves[this.step - 1] : [];
    moves.forEach((move, i) => this.drawMove(move, i, moves.length));
  }

  // A cell fills up with the ranks whose numbers are in it.
  drawCell(rank, chunk, value, ranks, changed) {
    const { drawing } = this.parts, x = this.x(rank), y = this.y(chunk);
    const share = this.plan.reduces ? ranks / this.world : 1;
    drawing.append(
      svg("rect", { x, y, width: CELL_WIDTH, height: CELL_HEIGHT, rx: 6, fill: "var(--cell)" }),
      svg("rect", { x, y, width: CELL_WIDTH * share, height: CELL_HEIGHT, rx: 6, fill: "var(--full-cell)" }),
      svg("rect", { x, y, width: CELL_WIDTH, height: CELL_HEIGHT, rx: 6, fill: "none", class: changed ? "changed" : "" }),
      svg("text", { x: x + CELL_WIDTH / 2, y: y + CELL_HEIGHT / 2, class: "value", "data-rank": rank, "data-chunk": chunk }, String(value)),
    );
  }

  // Between neighbours a straight arrow, past other ranks an arc below the row of cells.
  drawMove([from, to, chunk, adds], i, count) {
    const right = to > from, y = this.y(chunk) + CELL_HEIGHT * (right ? 0.3 : 0.7);
    const start = this.x(from) + (right ? CELL_WIDTH : 0), end = this.x(to) + (right ? 0 : CELL_WIDTH);
    const near = Math.abs(to - from) === 1;
    const bend = near ? y : right ? this.y(chunk) - 11 : this.y(chunk) + CELL_HEIGHT + 11;
    const stop = end + (right ? -3 : 3);
    const path = near ? `M${start} ${y} L${stop} ${y}` : `M${start} ${y} C${start + (right ? 26 : -26)} ${bend} ${stop + (right ? -26 : 26)} ${bend} ${stop} ${y}`;
    this.parts.drawing.append(svg("path", { d: path, fill: "none", stroke: `var(--${adds ? "add" : "copy"})`, "stroke-width": 2,
      opacity: count > 24 ? 0.55 : 0.9, "marker-end": `url(#${adds ? "add" : "copy"})` }));
  }

  arrowHeads() {
    const made = svg("defs", {});
    for (const kind of ["add", "copy"]) {
      const marker = svg("marker", { id: kind, viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" });
      marker.append(svg("path", { d: "M0 0 L8 4 L0 8 z", fill: `var(--${kind})` }));
      made.append(marker);
    }
    return made;
  }
}
