// A timeline that answers to mouse, touch and keyboard.

class Timeline {
  constructor(holder, panel, page) {
    this.panel = panel;
    this.page = page;
    this.canvas = holder.querySelector("canvas");
    this.cursor = holder.querySelector(".cursor");
    this.drawing = new Drawing(this.canvas, panel, page);
    this.canvas.style.height = `${heightOf(panel)}px`;
    this.isVisible = false;
    this.pointers = new Map();
    this.listen();
  }

  draw() { this.drawing.draw(); }

  // A line at `time` in every timeline; null: none.
  pointAt(time) {
    const x = time === null ? -1 : this.drawing.x(time);
    const isShown = x >= this.drawing.left && x <= this.drawing.right;
    this.cursor.style.display = isShown ? "block" : "none";
    if (isShown) this.cursor.style.transform = `translateX(${x}px)`;
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => { this.page.point(null); this.page.tip(null); });
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.page.tip(null));
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  down(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.place(event)[0]);
    this.start = this.place(event);
    this.isDragged = this.pointers.size > 1;
    this.page.tip(null);
  }

  move(event) {
    const [x, y] = this.place(event);
    const before = this.pointers.get(event.pointerId);
    if (before === undefined) {
      this.page.point(this.drawing.time(x));
      const bar = this.drawing.hit(x, y);
      this.page.tip(bar && { bar, panel: this.panel }, event.clientX, event.clientY);
      return;
    }
    if (Math.abs(x - this.start[0]) > 4) this.isDragged = true;
    if (!this.isDragged) return;
    const view = this.page.view, scale = view.span / (this.drawing.right - this.drawing.left);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
    if (others.length) {
      const other = others[0][1];
      const factor = Math.abs(x - other) / Math.max(Math.abs(before - other), 1);
      if (factor > 0) view.zoom(factor, this.drawing.time(other));
    } else {
      view.pan((before - x) * scale);
    }
    this.pointers.set(event.pointerId, x);
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    if (this.isDragged || event.type === "pointercancel") return;
    const bar = this.drawing.hit(...this.place(event));
    this.page.select(bar && { bar, panel: this.panel });
  }

  wheel(event) {
    const view = this.page.view, perPixel = view.span / (this.drawing.right - this.drawing.left);
    const delta = event.deltaMode === 1 ? 16 : 1;
    const isZoom = event.ctrlKey || event.metaKey;
    if (!isZoom && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      view.pan((event.deltaX || event.deltaY) * delta * perPixel);
    } else if (isZoom || document.activeElement === this.canvas) {
      const turned = Math.max(-200, Math.min(200, event.deltaY * delta));
      view.zoom(Math.exp(-turned * 0.004), this.drawing.time(this.place(event)[0]));
    } else {
      return;
    }
    event.preventDefault();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowRight: () => (event.shiftKey ? this.page.view.pan(this.page.view.span * 0.2) : this.step(1)),
      ArrowLeft: () => (event.shiftKey ? this.page.view.pan(this.page.view.span * -0.2) : this.step(-1)),
      ArrowDown: () => this.changeLane(1),
      ArrowUp: () => this.changeLane(-1),
      Home: () => this.go(this.row()[0]),
      End: () => this.go(this.row().at(-1)),
      e: () => this.exposed(1),
      E: () => this.exposed(-1),
      Enter: () => this.current() && this.page.view.zoomTo(this.current()),
      Escape: () => this.page.select(null),
    }[event.key];
    if (act === undefined) return;
    act();
    event.preventDefault();
    event.stopPropagation();
  }

  current() {
    const selected = this.page.view.selected;
    return selected !== null && selected.panel === this.panel ? selected.bar : null;
  }

  row() {
    const bar = this.current();
    const rows = this.panel.rows;
    return bar ? rows[bar.lane] : rows.find((row) => row.length) || [];
  }

  go(bar) {
    if (bar === undefined || bar === null) return;
    this.page.view.reveal(bar);
    this.page.select({ bar, panel: this.panel });
  }

  // Nothing selected yet: what is first in view.
  step(by) {
    const row = this.row(), bar = this.current();
    const at = bar ? row.indexOf(bar) + by : Math.min(firstAfter(row, this.page.view.begin), row.length - 1);
    this.go(row[Math.max(0, Math.min(at, row.length - 1))]);
  }

  changeLane(by) {
    const bar = this.current();
    if (!bar) { this.step(0); return; }
    const middle = (bar.begin + bar.end) / 2, rows = this.panel.rows;
    for (let lane = bar.lane + by; lane >= 0 && lane < rows.length; lane += by) {
      const row = rows[lane];
      if (row.length) { this.go(row[Math.min(firstAfter(row, middle), row.length - 1)]); return; }
    }
  }

  exposed(by) {
    const all = this.panel.bars.filter((bar) => bar.exposed > 0).sort((a, b) => a.begin - b.begin || a.index - b.index);
    if (all.length === 0) { this.page.say(`${this.panel.title}: nothing is exposed`); return; }
    const bar = this.current();
    const here = bar ? all.indexOf(bar) : -1;
    let at;
    if (here >= 0) at = (here + by + all.length) % all.length;
    else if (bar && by > 0) at = Math.max(0, all.findIndex((one) => one.begin >= bar.begin));
    else at = by > 0 ? 0 : all.length - 1;
    this.go(all[at]);
  }
}
