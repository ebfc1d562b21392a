// Where each lane lies: rank below rank, in each rank from what computes to what is on its way.

const KINDS = ["mark", "compute", "exposed", "gradient", "bucket", "operation"];
const TITLES = { compute: "computing", exposed: "waiting", gradient: "gradients", bucket: "buckets", operation: "operations" };
const AXIS = 24, RANK_TITLE = 22, GAP = 4, MARGIN = 10;

function rowHeight(kind, rows) {
  if (kind === "compute") return 20;
  if (kind === "exposed" || kind === "gradient" || kind === "mark") return 14;
  return Math.max(3, Math.min(kind === "bucket" ? 14 : 7, Math.floor((kind === "bucket" ? 112 : 56) / rows)));
}

// Bands in CSS pixels: {rank, kind, row, lane, inside, top, height}; `inside` are the waits that
// are drawn into a row of operations. `blocks`: one per rank, for its title and shading. Rows of
// `shown` lanes only: most steps need fewer rows than the one in which most is on its way at once.
function layOut(run, shown) {
  const bands = [], blocks = [], titles = [];
  let top = AXIS;
  for (const rank of run.ranks) {
    const mine = run.lanes.filter((lane) => lane.rank === rank);
    const block = { rank, top, waiting: mine.find((lane) => lane.kind === "waiting"),
      communication: mine.find((lane) => lane.kind === "communication") };
    top += RANK_TITLE;
    for (const kind of KINDS) {
      const rows = mine.filter((lane) => lane.kind === kind && shown.has(lane));
      if (!rows.length) continue;
      const height = rowHeight(kind, rows.length);
      titles.push({ text: TITLES[kind] || "", top, height: height * rows.length });
      for (const lane of rows) {
        const inside = kind === "operation" ? mine.find((l) => l.kind === "wait" && l.row === lane.row) : null;
        bands.push({ rank, kind, lane, inside, top, height: Math.max(2, height - (height > 13 ? 3 : height > 5 ? 2 : 1)) });
        top += height;
      }
      top += GAP;
    }
    block.bottom = top;
    top += MARGIN;
    blocks.push(block);
  }
  return { bands, blocks, titles, height: top };
}

// The lanes that are drawn for a span of time: those that have something in it. A kind that the rank
// has keeps a row, so that little moves from step to step.
function lanesWithin(run, begin, end) {
  const shown = new Set();
  for (const rank of run.ranks) {
    for (const kind of KINDS) {
      const rows = run.lanes.filter((lane) => lane.rank === rank && lane.kind === kind);
      const busy = rows.filter((lane) => lane.isBusy(begin, end));
      for (const lane of busy.length ? busy : rows.slice(0, 1)) shown.add(lane);
    }
  }
  return shown;
}

// The steps of a run, from the forwards of its first rank that has any.
function stepsOf(run) {
  const forward = run.lanes.find((lane) => lane.kind === "compute" && run.steps.length);
  return forward ? run.steps : [];
}

// The step that takes the median time, since the first one is rarely a usual one. Runs are compared
// at the same step, so of several it is one that all of them have.
function usualStep(steps, count) {
  if (!steps.length) return 0;
  const order = steps.slice(0, count).map((step, i) => [step[1] - step[0], i]).sort((a, b) => a[0] - b[0]);
  return order[order.length >> 1][1];
}
