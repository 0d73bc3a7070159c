// One backward on a canvas: an axis, a row for compute and for each lane, the curve of memory. All to the scale of the view.

const AXIS = 20, ROW = 26, BAR = 20, STRIP = 4, MEMORY = 64, FOOT = 6;
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const COLORS = [
  "card", "edge", "grid", "text", "quiet", "accent", "on-bar", "compute", "reduce_scatter", "all_reduce", "all_gather", "apply",
  "packing", "collective", "exposed", "memory",
];

function readColors() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(COLORS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

function heightOf(panel) { return AXIS + panel.lanes.length * ROW + MEMORY + FOOT; }

function gutterOf(width) { return width < 520 ? 74 : 92; }

function rowTop(lane) { return AXIS + lane * ROW; }

// Diagonal lines; `ratio` is that of the device.
function hatch(context, color, ratio, period) {
  const tile = document.createElement("canvas");
  const size = Math.round(period * ratio);
  tile.width = tile.height = size;
  const on = tile.getContext("2d");
  on.strokeStyle = color;
  on.lineWidth = 1.3 * ratio;
  on.beginPath();
  for (const shift of [-size, 0, size]) { on.moveTo(shift - 2, size + 2); on.lineTo(shift + size + 2, -2); }
  on.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

class Drawing {
  constructor(canvas, panel, page) {
    this.canvas = canvas;
    this.panel = panel;
    this.page = page;
    this.context = canvas.getContext("2d");
    this.hatches = null;
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth, height = heightOf(this.panel);
    if (this.width !== width || this.ratio !== ratio) {
      this.width = width;
      this.ratio = ratio;
      this.hatches = null;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    this.height = height;
    this.left = gutterOf(width);
    this.right = width - 8;
  }

  x(time) {
    const { begin, span } = this.page.view;
    return this.left + ((time - begin) / span) * (this.right - this.left);
  }

  rowTop(lane) { return rowTop(lane); }

  time(x) {
    const { begin, span } = this.page.view;
    return begin + ((x - this.left) / (this.right - this.left)) * span;
  }

  draw() {
    this.resize();
    if (this.width === 0) return;
    const context = this.context, colors = this.page.colors;
    if (this.hatches === null || this.hatches.of !== colors) {
      this.hatches = {
        of: colors, onBar: hatch(context, colors["on-bar"], this.ratio, 5), stood: hatch(context, colors.exposed, this.ratio, 6),
      };
    }
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.fillStyle = colors.card;
    context.fillRect(0, 0, this.width, this.height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.axis();
    this.labels();
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.right - this.left + 8, this.height);
    context.clip();
    this.panel.rows.forEach((row, lane) => this.row(row, lane));
    this.memory();
    this.end();
    this.marks();
    context.restore();
  }

  axis() {
    const { context } = this, colors = this.page.colors, { begin, end } = this.page.view;
    const { step, found } = ticks(begin, end, (this.right - this.left) / 90);
    const digits = Math.max(0, Math.ceil(-Math.log10(step * 1e3) - 1e-9));
    context.strokeStyle = colors.grid;
    context.fillStyle = colors.quiet;
    context.lineWidth = 1;
    context.textAlign = "center";
    for (const time of found) {
      const x = Math.round(this.x(time)) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS - 4);
      context.lineTo(x, this.height - FOOT);
      context.stroke();
      const words = `${(time * 1e3).toFixed(digits)}${time === found[0] ? " ms" : ""}`;
      const half = context.measureText(words).width / 2;
      context.fillText(words, Math.min(Math.max(x, this.left + half), this.right + 8 - half), AXIS / 2 - 1);
    }
  }

  labels() {
    const { context } = this, colors = this.page.colors;
    context.textAlign = "right";
    context.fillStyle = colors.text;
    const room = this.left - 10;
    this.panel.lanes.forEach((lane, at) => context.fillText(cut(context, lane, room), this.left - 8, rowTop(at) + BAR / 2));
    const top = this.memoryTop();
    context.fillText(cut(context, "memory", room), this.left - 8, top + MEMORY / 2 - 8);
    context.fillStyle = colors.quiet;
    context.fillText(cut(context, sizeText(this.panel.peak), room), this.left - 8, top + MEMORY / 2 + 8);
  }

  row(row, lane) {
    const { begin, end } = this.page.view;
    const top = rowTop(lane);
    let drawnTo = -Infinity;
    for (let i = firstAfter(row, begin); i < row.length && row[i].begin <= end; i++) {
      const bar = row[i];
      const x = Math.max(this.x(bar.begin), this.left - 4), right = Math.min(this.x(bar.end), this.right + 12);
      // Of bars within one pixel the first stands for all, unless a later one is exposed.
      if (right - x < 0.5 && right < drawnTo && bar.spans.length === 0) continue;
      drawnTo = Math.max(right, x + 0.5);
      if (bar.kind === WAIT) this.stood(bar, x, right, top);
      else this.bar(bar, x, right, top);
    }
  }

  stood(bar, x, right, top) {
    const { context } = this, colors = this.page.colors, width = Math.max(right - x, 1);
    context.fillStyle = this.hatches.stood;
    context.fillRect(x, top, width, BAR);
    context.strokeStyle = colors.exposed;
    context.lineWidth = 1.2;
    if (width > 2) context.strokeRect(x + 0.6, top + 0.6, width - 1.2, BAR - 1.2);
    this.label([`wait: ${bar.name}`, "wait"], x, width, top, colors.text, colors.card);
  }

  bar(bar, x, right, top) {
    const { context } = this, colors = this.page.colors;
    const color = colors[bar.kind] || colors.collective;
    // A hair apart, so that one can be told from the next.
    const width = Math.max(right - x - (right - x > 4 ? 1 : 0), 1);
    context.fillStyle = color;
    context.fillRect(x, top, width, BAR);
    for (const [from, to] of bar.spans) {
      const left = Math.max(this.x(from), x), wide = Math.max(Math.min(this.x(to), x + width) - left, 1);
      context.fillStyle = this.hatches.onBar;
      context.fillRect(left, top, wide, BAR);
      context.fillStyle = colors.exposed;
      context.fillRect(left, top + BAR, wide, STRIP);
    }
    const short = bar.name.replace(/^.*_(?=\d)/, "");
    this.label(bar.name ? [bar.name, short] : [], x, width, top, colors["on-bar"], bar.spans.length ? color : null);
  }

  // The first of `words` that there is room for; on a piece of `halo`, where it stands on hatching.
  label(words, x, width, top, color, halo) {
    const { context } = this;
    const from = Math.max(x, this.left), room = Math.min(x + width, this.right) - from - 4;
    if (room < 7) return;
    const text = words.find((one) => context.measureText(one).width <= room);
    if (text === undefined) return;
    context.textAlign = "center";
    const at = from + (room + 4) / 2, middle = top + BAR / 2 + 0.5;
    if (halo) {
      const half = context.measureText(text).width / 2 + 3;
      context.fillStyle = halo;
      context.fillRect(at - half, top + 3, 2 * half, BAR - 6);
    }
    context.fillStyle = color;
    context.fillText(text, at, middle);
  }

  memoryTop() { return rowTop(this.panel.lanes.length) + 4; }

  memoryY(size) {
    const room = MEMORY - 14;
    return this.memoryTop() + MEMORY - 4 - (size / this.page.topSize) * room;
  }

  memory() {
    const { context, panel } = this, colors = this.page.colors, cap = this.page.cap;
    const base = this.memoryY(0);
    const path = new Path2D();
    const steps = visibleSteps(panel.memory, this.page.view, panel.duration);
    path.moveTo(this.x(steps.length ? steps[0].at : 0), base);
    let last = 0;
    for (const { at, size } of steps) {
      path.lineTo(this.x(at), this.memoryY(last));
      path.lineTo(this.x(at), this.memoryY(size));
      last = size;
    }
    const outline = new Path2D(path);
    path.lineTo(this.x(panel.duration), this.memoryY(last));
    path.lineTo(this.x(panel.duration), base);
    context.globalAlpha = 0.25;
    context.fillStyle = colors.memory;
    context.fill(path);
    context.globalAlpha = 1;
    if (cap !== null && panel.peak > cap) {
      context.save();
      context.beginPath();
      context.rect(0, 0, this.width, this.memoryY(cap));
      context.clip();
      context.fillStyle = this.hatches.stood;
      context.fill(path);
      context.restore();
    }
    context.strokeStyle = colors.memory;
    context.lineWidth = 1.5;
    context.stroke(outline);
    this.level(panel.declared, `declared ${sizeText(panel.declared)}`, colors.memory, [2, 3], "left");
    if (cap !== null) {
      if (cap <= this.page.topSize) this.level(cap, `cap ${sizeText(cap)}`, colors.exposed, [7, 4], "right");
      else this.note(`cap ${sizeText(cap)}, above this scale`, this.memoryTop() + 4, colors.quiet, "right");
    }
  }

  level(size, words, color, dash, side) {
    const { context } = this, y = Math.round(this.memoryY(size)) + 0.5;
    context.strokeStyle = color;
    context.lineWidth = 1.3;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(this.left, y);
    context.lineTo(this.right, y);
    context.stroke();
    context.setLineDash([]);
    this.note(words, y - 7 < this.memoryTop() - 3 ? y + 8 : y - 7, this.page.colors.text, side);
  }

  note(words, y, color, side) {
    const { context } = this;
    context.textAlign = side;
    const x = side === "left" ? this.left + 4 : this.right - 2;
    context.strokeStyle = this.page.colors.card;
    context.lineWidth = 3;
    context.strokeText(words, x, y);
    context.fillStyle = color;
    context.fillText(words, x, y);
  }

  // The end of backward.
  end() {
    const x = Math.round(this.x(this.panel.duration)) - 0.5;
    if (x > this.right + 2 || x < this.left) return;
    this.context.strokeStyle = this.page.colors.text;
    this.context.lineWidth = 1.5;
    this.context.beginPath();
    this.context.moveTo(x, AXIS - 2);
    this.context.lineTo(x, this.height - FOOT);
    this.context.stroke();
    if (this.right - x > 70) {
      this.context.textAlign = "left";
      this.context.fillStyle = this.page.colors.text;
      this.context.fillText(ms(this.panel.duration), x + 6, rowTop(0) + BAR / 2);
    }
  }

  // Around what is selected, and around what has its name elsewhere.
  marks() {
    const selected = this.page.view.selected;
    if (selected === null) return;
    const own = selected.panel === this.panel;
    const { name, kind } = selected.bar;
    const alike = own ? [selected.bar] : name ? this.panel.bars.filter((bar) => bar.name === name && bar.kind === kind) : [];
    const { context } = this;
    context.strokeStyle = own ? this.page.colors.accent : this.page.colors.text;
    context.lineWidth = own ? 3 : 1.5;
    context.setLineDash(own ? [] : [4, 3]);
    for (const bar of alike) {
      const x = this.x(bar.begin), width = Math.max(this.x(bar.end) - x, 2);
      context.strokeRect(x - 1, rowTop(bar.lane) - 2, width + 2, BAR + 4);
    }
    context.setLineDash([]);
  }

  // What is under a point of the canvas.
  hit(x, y) {
    const lane = Math.floor((y - AXIS) / ROW);
    const row = this.panel.rows[lane];
    if (row === undefined || x < this.left) return null;
    const slack = (2 / (this.right - this.left)) * this.page.view.span;
    const time = this.time(x);
    let best = null, nearest = slack;
    for (let i = firstAfter(row, time - slack); i < row.length && row[i].begin <= time + slack; i++) {
      const away = Math.max(row[i].begin - time, time - row[i].end, 0);
      if (away <= nearest && (best === null || away < nearest)) { best = row[i]; nearest = away; }
      if (away === 0) return row[i];
    }
    return best;
  }
}

// The steps of a curve that lie in the view, and one on each side.
function visibleSteps(memory, view, duration) {
  let from = 0;
  while (from + 1 < memory.length && memory[from + 1].at <= view.begin) from++;
  let to = from;
  while (to < memory.length && memory[to].at <= Math.min(view.end, duration)) to++;
  return memory.slice(from, to + 1);
}

function cut(context, words, room) {
  if (context.measureText(words).width <= room) return words;
  let length = words.length;
  while (length > 1 && context.measureText(`${words.slice(0, length)}…`).width > room) length--;
  return `${words.slice(0, length)}…`;
}
