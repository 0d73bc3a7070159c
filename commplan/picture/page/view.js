// The time that all timelines show, and what is selected; whoever draws listens.

class View {
  constructor(longest) {
    this.longest = longest > 0 ? longest : 1;
    this.begin = 0;
    this.end = this.longest;
    this.selected = null;
    this.listeners = [];
    this.isDue = false;
  }

  get span() { return this.end - this.begin; }

  onChange(listener) { this.listeners.push(listener); }

  changed() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      for (const listener of this.listeners) listener();
    });
  }

  show(begin, end) {
    const span = Math.min(Math.max(end - begin, this.longest * 1e-5), this.longest);
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(middle - span / 2, 0), this.longest - span);
    this.end = this.begin + span;
    this.changed();
  }

  fit() { this.show(0, this.longest); }

  pan(seconds) { this.show(this.begin + seconds, this.end + seconds); }

  // `factor` above 1 zooms in; `time` stays where it is.
  zoom(factor, time = (this.begin + this.end) / 2) {
    const span = Math.min(Math.max(this.span / factor, this.longest * 1e-5), this.longest);
    const part = (time - this.begin) / this.span;
    this.show(time - part * span, time + (1 - part) * span);
  }

  // Moves as little as shows a bar, with some of what is around it.
  reveal(bar) {
    const margin = Math.min(this.span * 0.05, this.longest * 0.05);
    if (bar.end - bar.begin > this.span || bar.begin < this.begin) {
      this.show(bar.begin - margin, bar.begin - margin + this.span);
    } else if (bar.end > this.end) {
      this.show(bar.end + margin - this.span, bar.end + margin);
    }
  }

  zoomTo(bar) {
    const around = Math.max(bar.end - bar.begin, this.longest * 1e-4) * 1.5;
    this.show(bar.begin - around, bar.end + around);
  }

  select(selected) {
    this.selected = selected;
    this.changed();
  }
}

// Where a mark stands on an axis: some `count` round numbers between begin and end.
function ticks(begin, end, count) {
  const rough = (end - begin) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((of) => of * power).find((of) => of >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(begin / step - 1e-9); i * step <= end + step * 1e-9; i++) found.push(i * step);
  return { step, found };
}
