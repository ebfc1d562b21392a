// One run on a canvas, with an overview above. What is looked at is shared by all runs of the page:
// a span of time around the begin of a step, so that two runs lie under each other step by step.

const MOST_ARROWS = 300;

class Timeline {
  constructor(run, view, page) {
    Object.assign(this, { run, view, page });
    this.steps = stepsOf(run);
    this.step = 0;
    this.shown = lanesWithin(run, 0, run.end_ns);
    this.layout = layOut(run, this.shown);
    this.selected = null;
    this.readout = element("p");
    this.overview = element("canvas", { className: "overview" });
    this.canvas = element("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label",
      `Timeline of ${run.name}: ${run.headline}. Arrow keys select, plus and minus zoom.`);
    this.root = element("section", { className: "run" }, this.readout, this.overview, this.canvas);
    this.painter = new Painter(this.canvas);
    this.small = new Painter(this.overview);
  }

  get origin() { return this.steps.length ? this.steps[this.step][0] : 0; }

  get stepLength() {
    if (!this.steps.length) return this.run.end_ns;
    const [begin, end] = this.steps[this.step];
    return end - begin;
  }

  get scale() {
    const left = this.page.narrow ? 8 : 92;
    return { left, right: this.painter.width - 8, begin: this.origin + this.view.begin, end: this.origin + this.view.end };
  }

  resize() {
    const width = this.root.clientWidth;
    if (width <= 0) return;
    this.painter.resize(width, this.layout.height);
    this.small.resize(width, 30);
  }

  // Makes room for the rows of what is in view. Rows that have become empty go when `anew` (another
  // step, another zoom by a button), and stay during a drag, in which nothing may jump.
  arrange(anew) {
    const { begin, end } = this.scale;
    const wanted = lanesWithin(this.run, begin, end);
    if (!anew) for (const lane of this.shown) wanted.add(lane);
    if (wanted.size === this.shown.size && [...wanted].every((lane) => this.shown.has(lane))) return;
    this.shown = wanted;
    this.layout = layOut(this.run, wanted);
    this.resize();
  }

  // ---- drawing ----------------------------------------------------------------------------------

  colourOf(band) {
    const colour = this.painter.colour;
    if (band.kind === "bucket") return (i) => (this.labelOf(band.lane, i).phase === "all_gather" ? colour.gather : colour.flight);
    if (band.kind !== "compute") {
      return () => ({ operation: colour.flight, exposed: colour.exposed, mark: colour.mark })[band.kind];
    }
    return (i) => colour[this.labelOf(band.lane, i).colour];
  }

  labelOf(lane, i) { return this.run.labels[lane.label[i]]; }

  // What is written into an event. A rank with one stage need not say it: F3, and not 2F3.
  nameOf(lane, i) {
    const { n, pass } = this.labelOf(lane, i);
    if (pass && !this.run.several_stages.includes(lane.rank)) return pass[1] + pass[2];
    return n.replace("bucket ", "");
  }

  draw() {
    const { painter, scale, layout } = this;
    painter.clear();
    painter.axis(scale, this.origin, layout.height);
    for (const block of layout.blocks) {
      painter.shading(scale, block.waiting, block.top + RANK_TITLE - 2, block.bottom - block.top - RANK_TITLE);
      this.drawTitle(block, scale);
    }
    if (!this.page.narrow) {
      for (const title of layout.titles) painter.text(title.text, 14, title.top + Math.min(8, Math.max(6, title.height / 2)), painter.colour.dim,
        '12px system-ui, "DejaVu Sans", sans-serif');
    }
    for (const band of layout.bands) this.drawBand(band, scale);
    this.drawMessages(scale);
    this.drawSelection(scale);
    this.drawOverview();
    this.writeReadout(scale);
  }

  drawTitle(block, scale) {
    const { painter } = this;
    const span = scale.end - scale.begin;
    const share = (lane) => (lane ? lane.between(scale.begin, scale.end) : 0);
    painter.text(`rank ${block.rank}`, this.page.narrow ? 8 : 14, block.top + 11, painter.colour.ink);
    if (share(block.communication) > 0) {
      const whole = this.page.narrow ? "" : ` of ${timeText(span)} in view`;
      const text = `communication ${timeText(share(block.communication))}, exposed ${timeText(share(block.waiting))}${whole}`;
      painter.text(text, this.page.narrow ? 64 : 92, block.top + 11, painter.colour.dim, '12px system-ui, "DejaVu Sans", sans-serif');
    }
  }

  drawBand(band, scale) {
    const { painter } = this, { lane, top, height } = band;
    if (band.kind === "gradient") return painter.ticks(scale, lane, top, height);
    if (band.kind === "bucket") painter.buckets(scale, lane, top, height, this.colourOf(band));
    else painter.lane(scale, lane, top, height, this.colourOf(band));
    if (band.inside) {
      const inset = Math.max(1, Math.round(height / 3));
      painter.lane(scale, band.inside, top + height - inset, inset, () => painter.colour.wait);
    }
    if (band.kind === "compute" || band.kind === "bucket") {
      painter.names(scale, lane, top, height, (i) => this.nameOf(lane, i));
    }
    return undefined;
  }

  // Arrows from where a message was sent to where it was received, unless they would be a thicket.
  drawMessages(scale) {
    const lanes = this.run.lanes.filter((lane) => lane.kind === "message"), seen = [];
    for (const lane of lanes) {
      for (let i = 0; i < lane.length && lane.begin[i] < scale.end; i++) if (lane.end[i] > scale.begin) seen.push([lane, i]);
    }
    if (seen.length > MOST_ARROWS) return;
    const computing = (rank) => this.layout.bands.find((band) => band.rank === rank && band.kind === "compute");
    for (const [lane, i] of seen) {
      const from = computing(lane.rank), to = computing(lane.number[i]);
      if (!from || !to || from === to) continue;
      const down = to.top > from.top;
      this.painter.arrow(scale, lane.begin[i], from.top + (down ? from.height : 0), lane.end[i], to.top + (down ? 0 : to.height));
    }
  }

  drawSelection(scale) {
    if (!this.selected) return;
    const { lane, index } = this.selected, band = this.bandOf(this.selected);
    if (!band) return;
    const x = this.painter.toX(scale, lane.begin[index]), right = this.painter.toX(scale, lane.end[index]);
    if (right < scale.left || x > scale.right) return;
    const left = Math.max(scale.left, x);
    this.painter.outline(left, band.top, Math.max(2, Math.min(scale.right, right) - left), band.height);
  }

  // The whole run: all communication of the first rank, what of it was exposed, where we are.
  drawOverview() {
    const { small } = this;
    const scale = { left: this.scale.left, right: this.scale.right, begin: 0, end: this.run.end_ns };
    small.clear();
    const block = this.layout.blocks[0];
    if (block.communication) small.lane(scale, block.communication, 6, 9, () => small.colour.flight);
    if (block.waiting) small.lane(scale, block.waiting, 16, 7, () => small.colour.exposed);
    if (!this.page.narrow) small.text("whole run", 14, 15, small.colour.dim, '12px system-ui, "DejaVu Sans", sans-serif');
    const from = Math.max(scale.left, small.toX(scale, this.scale.begin)), to = Math.min(scale.right, small.toX(scale, this.scale.end));
    small.context.strokeStyle = small.colour.accent;
    small.context.lineWidth = 2;
    small.context.strokeRect(from, 3, Math.max(3, to - from), 24);
  }

  // Means over the ranks of what is in view.
  writeReadout(scale) {
    const blocks = this.layout.blocks;
    const mean = (pick) => blocks.reduce((sum, block) => sum + (pick(block) ? pick(block).between(scale.begin, scale.end) : 0), 0) / blocks.length;
    const communication = mean((block) => block.communication), exposed = mean((block) => block.waiting);
    const where = this.steps.length ? `step ${this.step + 1} of ${this.steps.length}: ${timeText(this.stepLength)}` : "";
    this.readout.replaceChildren(element("b", { textContent: this.run.name }), element("span", { textContent: where }),
      element("span", { textContent: `in view ${timeText(scale.end - scale.begin)}: communication ${timeText(communication)}, exposed ${timeText(exposed)}` }));
  }

  // ---- what lies where ----------------------------------------------------------------------------

  // The event at a place of the canvas: {band, lane, index}; within 4 pixels beside it will do.
  find(x, y) {
    const { scale } = this;
    const reach = 4 * (scale.end - scale.begin) / (scale.right - scale.left);
    const time = scale.begin + (x - scale.left) * reach / 4;
    for (const band of this.layout.bands) {
      if (y < band.top - 1 || y > band.top + band.height + 1 || x < scale.left) continue;
      const lower = band.inside && y > band.top + band.height * 2 / 3;
      for (const lane of lower ? [band.inside, band.lane] : [band.lane]) {
        const index = nearest(lane, time, reach);
        if (index >= 0) return { band, lane, index };
      }
    }
    return null;
  }

  // Where the row of what was found lies now.
  bandOf(found) { return this.layout.bands.find((band) => band.lane === found.band.lane); }

  select(found) {
    this.selected = found;
    this.page.describe(this, found);
    this.page.draw();
  }

  moveSelection(by) {
    const { lane, index } = this.selected;
    const next = Math.min(lane.length - 1, Math.max(0, index + by));
    this.show({ ...this.selected, index: next });
  }

  moveLane(by) {
    const bands = this.layout.bands;
    const at = this.selected ? bands.indexOf(this.bandOf(this.selected)) : by > 0 ? -1 : bands.length;
    const band = bands[Math.min(bands.length - 1, Math.max(0, at + by))];
    const middle = this.selected ? this.selected.lane.begin[this.selected.index] : this.origin + (this.view.begin + this.view.end) / 2;
    const index = Math.max(0, Math.min(band.lane.length - 1, band.lane.after(middle) - 1));
    this.show({ band, lane: band.lane, index });
  }

  // Selects, and pans where what is selected is not in view.
  show(found) {
    const begin = found.lane.begin[found.index] - this.origin;
    const span = this.view.end - this.view.begin;
    if (begin < this.view.begin || begin > this.view.end) this.view.begin = begin - span / 3;
    this.view.end = this.view.begin + span;
    this.select(found);
  }
}

function nearest(lane, time, reach) {
  const next = lane.after(time);
  for (let i = next - 1; i >= Math.max(0, next - 3); i--) if (lane.end[i] >= time) return i;
  const choices = [next - 1, next].filter((i) => i >= 0 && i < lane.length);
  const distance = (i) => Math.max(0, lane.begin[i] - time, time - lane.end[i]);
  choices.sort((a, b) => distance(a) - distance(b));
  return choices.length && distance(choices[0]) <= reach ? choices[0] : -1;
}
