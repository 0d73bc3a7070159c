// What the page holds, unpacked: panels with bars, times in seconds.

const WAIT = "wait", COMPUTE = "compute", PACKING = "packing";

// A column: a list, or {runs: [value, how often, ...]}.
function column(packed) {
  if (Array.isArray(packed)) return packed;
  const found = [];
  for (let i = 0; i < packed.runs.length; i += 2) {
    for (let n = packed.runs[i + 1]; n > 0; n--) found.push(packed.runs[i]);
  }
  return found;
}

// A column that has each value less the one before.
function sums(packed) {
  let sum = 0;
  return column(packed).map((step) => (sum += step));
}

function unpack(data) {
  const { strings, sizes, whats, unit_s: unit } = data;
  return data.panels.map((packed, number) => {
    const of = packed.bars;
    const [what, limit, hook] = [sums(of.what), sums(of.limit), sums(of.hook)];
    const [lane, ran, lag, exposed, line] = [of.lane, of.ran, of.lag, of.exposed, of.line].map(column);
    const bars = sums(of.begin).map((begin, i) => {
      const [name, kind, modules, size] = whats[what[i]];
      return {
        index: i,
        lane: lane[i],
        name: strings[name],
        kind: strings[kind],
        modules: strings[modules],
        size: sizes[size],
        begin: begin * unit,
        end: (begin + ran[i]) * unit,
        issued: lag[i] < 0 ? null : (begin - lag[i]) * unit,
        limit: strings[limit[i]],
        exposed: exposed[i] * unit,
        why: i in packed.why ? packed.why[i].map((reason) => strings[reason]) : null,
        hook: strings[hook[i]],
        line: strings[line[i]],
        spans: [],
      };
    });
    const lanes = packed.lanes.map((lane) => strings[lane]);
    const rows = lanes.map((_, lane) => bars.filter((bar) => bar.lane === lane));
    const waits = bars.filter((bar) => bar.kind === WAIT);
    for (const bar of bars) if (bar.exposed > 0) bar.spans = within(bar, waits);
    const held = column(packed.memory[1]);
    const memory = sums(packed.memory[0]).map((at, i) => ({ at: at * unit, size: sizes[held[i]] }));
    return {
      number,
      section: packed.section,
      isMeasured: packed.measured === 1,
      title: strings[packed.title],
      duration: packed.duration * unit,
      peak: packed.peak,
      declared: packed.declared,
      lanes, rows, bars, waits, memory,
    };
  });
}

// The parts of a bar in which compute stood still; waits ascend and are apart.
function within(bar, waits) {
  const found = [];
  for (let i = firstAfter(waits, bar.begin); i < waits.length && waits[i].begin < bar.end; i++) {
    found.push([Math.max(bar.begin, waits[i].begin), Math.min(bar.end, waits[i].end)]);
  }
  return found;
}

// The place of the first bar that ends after `time`; bars ascend.
function firstAfter(bars, time) {
  let low = 0, high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle].end <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function ms(seconds) {
  const value = seconds * 1e3;
  const size = Math.abs(value);
  return `${value.toFixed(size >= 1 || value === 0 ? 1 : size >= 0.1 ? 2 : 3)} ms`;
}

function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < units.length) { bytes /= 1024; unit++; }
  return unit ? `${bytes.toFixed(1)} ${units[unit]}` : `${bytes} B`;
}

const KIND_WORDS = {
  reduce_scatter: "reduce-scatter", all_reduce: "all-reduce", all_gather: "all-gather",
  apply: "apply", collective: "collective", packing: "packing", compute: "compute", wait: "wait",
};

function nameOf(bar) {
  if (bar.kind === WAIT) return `compute stands still, for ${bar.name}`;
  if (bar.kind === PACKING) return `packing for ${bar.name}`;
  if (bar.kind === COMPUTE) return bar.name ? `compute ${bar.name}` : "compute";
  return bar.name;
}

// What there is to say of a bar: [class, sentence] for each.
function sentences(bar, panel) {
  const told = [["", `Takes ${ms(bar.end - bar.begin)}, from ${ms(bar.begin)} to ${ms(bar.end)}.`]];
  const isOp = ![WAIT, COMPUTE, PACKING].includes(bar.kind);
  const lane = panel.lanes[bar.lane];
  if (isOp) {
    const words = KIND_WORDS[bar.kind] || bar.kind;
    const parts = [`${words[0].toUpperCase()}${words.slice(1)} on lane ${lane}`];
    if (bar.modules) parts.push(`of ${bar.modules}`);
    if (bar.size) parts.push(sizeText(bar.size));
    told.push(["", `${parts.join(", ")}.`]);
  }
  if (bar.exposed > 0) {
    told.push(["why", `Exposed for ${ms(bar.exposed)}: ${bar.why ? bar.why.join("; ") : "why is left out for its size"}.`]);
  } else if (isOp && lane !== COMPUTE) {
    told.push(["", "Hidden behind compute."]);
  }
  if (bar.limit) told.push(["", `Could not begin before ${bar.limit}.`]);
  const place = [bar.hook, bar.line].filter(Boolean).join(", ");
  const lag = bar.issued === null ? 0 : bar.begin - bar.issued;
  const issued = lag > 0 ? `Issued ${ms(lag)} before, in` : "Issued in";
  if (place) told.push(["", `${isOp ? issued : "In"} ${place}.`]);
  return told;
}
