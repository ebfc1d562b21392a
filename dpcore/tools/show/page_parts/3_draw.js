// Draws lanes onto a canvas. What is narrower than a pixel is drawn as a shade: the share of the
// pixel's time that events cover, from sums that were taken once. So a frame costs a few steps per
// pixel, whatever the number of events, and no event disappears.

const NARROW = 3; // events per pixel from which on shades are drawn

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colour = {};
    for (const name of ["page", "panel", "ink", "dim", "line", "accent", "forward", "backward", "update", "input", "weight", "message", "span", "filling", "full",
      "flight", "gather", "wait", "exposed", "gradient", "mark", "shade"]) this.colour[name] = style.getPropertyValue(`--${name}`).trim();
  }

  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  clear() {
    this.context.globalAlpha = 1;
    this.context.fillStyle = this.colour.panel;
    this.context.fillRect(0, 0, this.width, this.height);
  }

  // `scale`: {left, right, begin, end}, pixels and nanoseconds.
  toX(scale, time) {
    return scale.left + (time - scale.begin) / (scale.end - scale.begin) * (scale.right - scale.left);
  }

  lane(scale, lane, top, height, colourOf) {
    const perPixel = (scale.end - scale.begin) / (scale.right - scale.left);
    const first = Math.max(0, lane.after(scale.begin) - 1), last = lane.after(scale.end);
    if ((last - first) / (scale.right - scale.left) > 1 / NARROW) {
      this.shades(scale, lane, top, height, colourOf(first), perPixel);
      return;
    }
    for (let i = first; i < last; i++) {
      if (lane.end[i] < scale.begin) continue;
      const x = Math.max(scale.left, this.toX(scale, lane.begin[i]));
      const right = Math.min(scale.right, this.toX(scale, lane.end[i]));
      this.context.fillStyle = colourOf(i);
      this.context.fillRect(x, top, Math.max(1, right - x - (right - x > 4 ? 1 : 0)), height);
    }
  }

  shades(scale, lane, top, height, colour, perPixel) {
    this.context.fillStyle = colour;
    let before = lane.coveredUntil(scale.begin);
    for (let x = scale.left; x < scale.right; x++) {
      const until = lane.coveredUntil(scale.begin + (x + 1 - scale.left) * perPixel);
      if (until > before) {
        this.context.globalAlpha = Math.min(1, 0.15 + 0.85 * (until - before) / perPixel);
        this.context.fillRect(x, top, 1, height);
      }
      before = until;
    }
    this.context.globalAlpha = 1;
  }

  ticks(scale, lane, top, height) { // moments
    const perPixel = (scale.end - scale.begin) / (scale.right - scale.left);
    this.context.fillStyle = this.colour.gradient;
    let next = lane.after(scale.begin);
    for (let x = scale.left; x < scale.right && next < lane.length; x++) {
      const until = lane.after(scale.begin + (x + 1 - scale.left) * perPixel);
      if (until > next) {
        this.context.globalAlpha = Math.min(1, 0.45 + 0.14 * (until - next));
        this.context.fillRect(x, top, 1, height);
      }
      next = until;
    }
    this.context.globalAlpha = 1;
  }

  // Filling, full and not yet sent, on its way.
  buckets(scale, lane, top, height, colourOf) {
    const first = Math.max(0, lane.after(scale.begin) - 1), last = lane.after(scale.end);
    if ((last - first) / (scale.right - scale.left) > 1 / NARROW) {
      this.shades(scale, lane, top, height, this.colour.flight,
        (scale.end - scale.begin) / (scale.right - scale.left));
      return;
    }
    const clamp = (time) => Math.min(scale.right, Math.max(scale.left, this.toX(scale, time)));
    for (let i = first; i < last; i++) {
      const [a, b, c, d] = [lane.begin[i], lane.ready[i], lane.launch[i], lane.end[i]].map(clamp);
      if (d < a || lane.end[i] < scale.begin) continue;
      const third = Math.max(1, Math.round(height / 3));
      this.context.fillStyle = this.colour.filling;
      this.context.fillRect(a, top + third, Math.max(0, c - a), height - 2 * third || 1);
      this.context.fillStyle = this.colour.full;
      if (c - b >= 0.5) this.context.fillRect(b, top + third, c - b, height - 2 * third || 1);
      this.context.fillStyle = colourOf(i);
      this.context.fillRect(c, top, Math.max(1, d - c - (d - c > 4 ? 1 : 0)), height);
    }
  }

  // Names in what is wide enough for them.
  names(scale, lane, top, height, nameOf) {
    const first = Math.max(0, lane.after(scale.begin) - 1), last = lane.after(scale.end);
    if (height < 9 || last - first > 400) return;
    this.context.font = `${Math.min(11, height - 1)}px system-ui, "DejaVu Sans", sans-serif`;
    this.context.textBaseline = "middle";
    for (let i = first; i < last; i++) {
      const from = lane.launch ? lane.launch[i] : lane.begin[i];
      const x = Math.max(scale.left, this.toX(scale, from)), right = Math.min(scale.right, this.toX(scale, lane.end[i]));
      const text = nameOf(i);
      if (right - x > this.context.measureText(text).width + 8) {
        this.context.fillStyle = "#fff";
        this.context.fillText(text, x + 4, top + height / 2 + 0.5);
      }
    }
  }

  // Round times that are 70 to 200 pixels apart; 0 is the begin of the step.
  axis(scale, origin, height) {
    const span = scale.end - scale.begin, wanted = span / (scale.right - scale.left) * 110;
    const unit = 10 ** Math.floor(Math.log10(wanted));
    const distance = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= wanted);
    this.context.font = '11.5px system-ui, "DejaVu Sans", sans-serif';
    this.context.textBaseline = "middle";
    for (let n = Math.ceil((scale.begin - origin) / distance); n * distance <= scale.end - origin; n++) {
      const x = Math.round(this.toX(scale, origin + n * distance));
      this.context.fillStyle = this.colour.line;
      this.context.fillRect(x, AXIS - 6, 1, height);
      const text = n === 0 ? "0" : timeText(n * distance).replace(/\.?0+ /, " ");
      this.context.fillStyle = this.colour.dim;
      if (x + 50 < scale.right) this.context.fillText(text, x + 4, 11);
    }
  }

  shading(scale, lane, top, height) {
    if (lane) this.lane(scale, lane, top, height, () => this.colour.shade);
  }

  // Cut off where the view ends; without a head where that is out of view.
  arrow(scale, begin, fromY, end, toY) {
    const { context } = this, x = this.toX(scale, begin), right = this.toX(scale, end);
    const height = (at) => fromY + (right > x ? (at - x) / (right - x) : 1) * (toY - fromY);
    const from = Math.max(scale.left, x), to = Math.min(scale.right, right);
    context.strokeStyle = context.fillStyle = this.colour.message;
    context.lineWidth = 1.2;
    context.beginPath();
    context.moveTo(from, x < from ? height(from) : fromY);
    context.lineTo(to, right > to ? height(to) : toY);
    context.stroke();
    if (right > scale.right) return;
    const turn = Math.atan2(toY - fromY, right - x), side = (by) => [right - 6 * Math.cos(turn + by), toY - 6 * Math.sin(turn + by)];
    context.beginPath();
    context.moveTo(right, toY);
    context.lineTo(...side(0.4));
    context.lineTo(...side(-0.4));
    context.fill();
  }

  text(text, x, y, colour, font = '600 12.5px system-ui, "DejaVu Sans", sans-serif') {
    this.context.font = font;
    this.context.textBaseline = "middle";
    this.context.fillStyle = colour;
    this.context.fillText(text, x, y);
  }

  outline(x, y, width, height) {
    this.context.strokeStyle = this.colour.ink;
    this.context.lineWidth = 2;
    this.context.strokeRect(x - 1, y - 1, width + 2, height + 2);
  }
}
