// The data of the page: figures as JSON, events as compressed columns (dpcore/tools/show/columns.py).

// A lane is a list of events in order of time, as typed arrays; times are nanoseconds.
class Lane {
  constructor(head, tick, columns) {
    Object.assign(this, head);
    const [begins, spans, labels, numbers, ready, launch, exposed] = columns;
    this.length = head.count;
    this.begin = new Float64Array(this.length);
    this.end = new Float64Array(this.length);
    this.covered = new Float64Array(this.length + 1); // by the events before each
    let at = 0;
    for (let i = 0; i < this.length; i++) {
      at += begins[i];
      this.begin[i] = at * tick;
      this.end[i] = (at + spans[i]) * tick;
      this.covered[i + 1] = this.covered[i] + spans[i] * tick;
    }
    this.label = labels;
    this.number = numbers;
    if (ready) {
      this.ready = Float64Array.from(ready, (value, i) => this.begin[i] + value * tick);
      this.launch = Float64Array.from(launch, (value, i) => this.begin[i] + value * tick);
      this.exposed = Float64Array.from(exposed, (value) => value * tick);
    }
  }

  // The first event that begins after a moment.
  after(time) {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begin[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  // How much of the time before a moment the events cover: they follow each other.
  coveredUntil(time) {
    const next = this.after(time);
    if (next === 0) return 0;
    return this.covered[next - 1] + Math.min(time, this.end[next - 1]) - this.begin[next - 1];
  }

  // Whether anything happens in a span of time. Events of a row follow each other.
  isBusy(begin, end) {
    const next = this.after(end);
    return next > 0 && this.end[next - 1] >= begin;
  }

  between(begin, end) { return this.coveredUntil(end) - this.coveredUntil(begin); }
}

async function inflate(text) {
  const letters = atob(text.trim()), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Columns lie in the order of the lanes, each as four planes of bytes, lowest first.
function unpack(bytes, heads, tick) {
  let offset = 0;
  return heads.map((head) => {
    const columns = [];
    for (let c = 0; c < head.columns; c++) {
      const n = head.count, column = new Uint32Array(n);
      for (let i = 0; i < n; i++) {
        const low = bytes[offset + i] | bytes[offset + n + i] << 8 | bytes[offset + 2 * n + i] << 16;
        column[i] = (low | bytes[offset + 3 * n + i] << 24) >>> 0;
      }
      offset += 4 * n;
      columns.push(column);
    }
    return new Lane(head, tick, columns);
  });
}

async function loadRuns() {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const [i, run] of data.runs.entries()) {
    const bytes = await inflate(document.getElementById(`columns-${i}`).textContent);
    run.lanes = unpack(bytes, run.lanes, run.tick_ns);
    run.number = i;
  }
  return data;
}

// ---- texts ------------------------------------------------------------------------------------

function short(value) {
  const decimals = value < 1 ? 3 : value < 10 ? 2 : value < 100 ? 1 : 0;
  return value.toFixed(decimals);
}

function timeText(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${ns.toFixed(0)} ns`;
  if (size < 1e6) return `${(ns / 1e3).toPrecision(3)} µs`;
  if (size < 1e9) return `${(ns / 1e6).toPrecision(4)} ms`;
  return `${(ns / 1e9).toPrecision(4)} s`;
}

function bytesText(bytes) {
  if (bytes >= 1 << 20) return `${(bytes / (1 << 20)).toFixed(2)} MiB`;
  if (bytes >= 1 << 10) return `${(bytes / (1 << 10)).toFixed(1)} KiB`;
  return `${bytes} B`;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}
