// Mouse, touch and keys on a timeline. What the wheel does is told in the hint of page.html: the page is
// longer than the window, so it scrolls until the user turns the wheel with a key, or has clicked into
// the timeline. (Two fingers on a touchpad arrive as a wheel with Ctrl.)

function listenTo(timeline, page) {
  const { canvas, view } = timeline;
  const pointers = new Map();
  let dragged = 0;

  const timeAt = (x) => {
    const scale = timeline.scale;
    return view.begin + (x - scale.left) / (scale.right - scale.left) * (view.end - view.begin);
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener("wheel", (event) => {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      page.pan(event.deltaX / timeline.painter.width);
    } else if (event.ctrlKey || event.shiftKey || event.altKey || document.activeElement === canvas) {
      page.zoom(Math.exp(event.deltaY * 0.0016), timeAt(place(event)[0]));
    } else {
      return;
    }
    event.preventDefault();
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    dragged = 0;
    if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!pointers.has(event.pointerId)) {
      page.point(timeline, timeline.find(x, y), event);
      return;
    }
    const before = [...pointers.values()];
    const width = timeline.scale.right - timeline.scale.left;
    pointers.set(event.pointerId, event.clientX);
    if (pointers.size === 1) {
      dragged += Math.abs(event.clientX - before[0]);
      if (dragged > 3) page.pan((before[0] - event.clientX) / width);
    } else if (pointers.size === 2) {
      const after = [...pointers.values()];
      const apart = (values) => Math.max(12, Math.abs(values[0] - values[1]));
      const middle = (after[0] + after[1]) / 2 - canvas.getBoundingClientRect().left;
      page.zoom(apart(before) / apart(after), timeAt(middle));
      dragged = 99;
    }
  });
  const release = (event) => {
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && dragged <= 3) {
      timeline.select(timeline.find(...place(event)));
    }
  };
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, release);
  canvas.addEventListener("pointerleave", () => page.point(timeline, null));
  canvas.addEventListener("dblclick", (event) => page.zoom(0.4, timeAt(place(event)[0])));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const action = KEYS[event.key];
    if (action) {
      action(timeline, page);
      event.preventDefault();
    }
  });

  const jump = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = timeline.overview.getBoundingClientRect(), scale = timeline.scale;
    const time = (event.clientX - box.left - scale.left) / (scale.right - scale.left) * timeline.run.end_ns;
    page.goTo(timeline, time);
  };
  timeline.overview.addEventListener("pointerdown", jump);
  timeline.overview.addEventListener("pointermove", jump);
}

const KEYS = {
  ArrowLeft: (timeline, page) => (timeline.selected ? timeline.moveSelection(-1) : page.pan(-0.15)),
  ArrowRight: (timeline, page) => (timeline.selected ? timeline.moveSelection(1) : page.pan(0.15)),
  ArrowUp: (timeline) => timeline.moveLane(-1),
  ArrowDown: (timeline) => timeline.moveLane(1),
  "+": (_, page) => page.zoom(0.6),
  "=": (_, page) => page.zoom(0.6),
  "-": (_, page) => page.zoom(1 / 0.6),
  0: (_, page) => page.everything(),
  1: (_, page) => page.oneStep(),
  s: (_, page) => page.otherStep(1),
  S: (_, page) => page.otherStep(-1),
  Escape: (timeline) => timeline.select(null),
  Enter: (timeline, page) => {
    if (!timeline.selected) return;
    const { lane, index } = timeline.selected;
    const length = Math.max(1000, lane.end[index] - lane.begin[index]);
    page.look(lane.begin[index] - timeline.origin - length / 4, lane.end[index] - timeline.origin + length / 4);
  },
};
