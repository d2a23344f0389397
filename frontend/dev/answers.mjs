// Answers of docs/http_api.md, computed by replaying an imagined step.
import { CATEGORIES } from "./training.mjs";

const sum = (list, of) => list.reduce((s, x) => s + of(x), 0);
const moduleKey = (a) => a.module ?? (a.operator ? `outside:${a.operator}` : "(not named)");
const keyOf = {
  category: (a) => a.category,
  module: moduleKey,
  phase: (a) => a.phase,
  operator: (a) => a.operator ?? "(not named)",
};

export function replay(step) {
  if (step.curve) return step.curve;
  let total = sum(step.startState, (a) => a.bytes);
  let reserved = Math.ceil((total * 1.15) / 2 ** 21) * 2 ** 21;
  const totals = step.events.map((e) => (total += e.sign * e.a.bytes));
  const reserves = totals.map((t) => (reserved = Math.max(reserved, Math.ceil((t * 1.06) / 2 ** 21) * 2 ** 21)));
  let peak = 0;
  totals.forEach((t, i) => {
    if (t > totals[peak]) peak = i;
  });
  return (step.curve = { totals, reserves, peak, startTotal: sum(step.startState, (a) => a.bytes) });
}

export function liveAt(step, event) {
  const live = new Set(step.startState);
  for (let i = 0; i <= event; i++) step.events[i].sign > 0 ? live.add(step.events[i].a) : live.delete(step.events[i].a);
  return [...live];
}

export function parts(live, by) {
  const map = new Map();
  for (const a of live) {
    const key = keyOf[by](a);
    const p = map.get(key) ?? { key, bytes: 0, count: 0, ...(by === "module" ? { categories: {} } : {}) };
    p.bytes += a.bytes;
    p.count += 1;
    if (p.categories) p.categories[a.category] = (p.categories[a.category] ?? 0) + a.bytes;
    map.set(key, p);
  }
  return [...map.values()].sort((x, y) => y.bytes - x.bytes);
}

const allocation = (a) => ({
  bytes: a.bytes,
  category: a.category,
  module: a.module,
  operator: a.operator,
  phase: a.phase,
  name: a.name,
  born_ns: a.born,
  freed_ns: a.freed,
  address: `0x${a.address.toString(16)}`,
});
const largest = (live) =>
  [...live]
    .sort((a, b) => b.bytes - a.bytes)
    .slice(0, 12)
    .map(allocation);

export function stats(step, run) {
  const { totals, reserves, peak, startTotal } = replay(step);
  const born = step.events.filter((e) => e.sign > 0);
  const stayed = born.filter((e) => e.a.freed === null);
  return {
    peak_bytes: totals[peak],
    peak_time_ns: step.events[peak].t,
    start_bytes: startTotal,
    end_bytes: totals.at(-1),
    window_peak_bytes: Math.max(
      ...run.steps.map((s) => {
        const c = replay(s);
        return c.totals[c.peak];
      }),
    ),
    peak_reserved_bytes: run.device === "cpu" ? null : Math.max(...reserves),
    step_start_ns: step.start,
    step_end_ns: step.end,
    allocated_bytes: sum(born, (e) => e.a.bytes),
    allocations: born.length,
    stayed_bytes: sum(stayed, (e) => e.a.bytes),
    stayed: stayed.length,
    capacity_bytes: run.capacity ?? null,
  };
}

export function stepAnswer(run, step) {
  const { peak } = replay(step);
  const live = liveAt(step, peak);
  const at = step.events[peak];
  const i = run.steps.indexOf(step);
  return {
    run: run.run,
    worker: "rank0",
    step: step.step,
    device: run.device,
    stats: stats(step, run),
    peak: {
      bytes: sum(live, (a) => a.bytes),
      time_ns: at.t,
      event: peak,
      phase: at.a.phase,
      operator: at.a.operator,
      module: at.a.module,
      by_category: parts(live, "category"),
      by_module: parts(live, "module"),
      by_operator: parts(live, "operator"),
      by_phase: parts(live, "phase"),
      largest: largest(live),
    },
    notes: run.notes ?? [],
    previous_step: i > 0 ? run.steps[i - 1].step : null,
    source: {
      kind: "torch.profiler",
      torch: "2.13.0",
      side_file: `${run.run}/plugins/tb_memplugin/rank0.step${step.step}.mem`,
      side_file_present: !run.coarse,
      window: 0,
      epoch_ns: "1763712000000000000",
    },
  };
}

/** Index of the last event at or before t; -1 before the first. */
export function eventAt(step, t) {
  let low = 0,
    high = step.events.length;
  while (low < high) {
    const m = (low + high) >> 1;
    step.events[m].t <= t ? (low = m + 1) : (high = m);
  }
  return low - 1;
}

export function curve(run, step, by, t0, t1, px) {
  const { totals, reserves, startTotal } = replay(step);
  if (run.coarse) px = 24;
  const columns = Array.from({ length: px }, () => null);
  const live = new Map();
  const put = (a, sign) => {
    const k = keyOf[by](a);
    live.set(k, (live.get(k) ?? 0) + sign * a.bytes);
  };
  step.startState.forEach((a) => put(a, 1));
  let total = startTotal,
    reserved = reserves[0],
    best = { bytes: -1 },
    next = 0;
  const see = (c, event) => {
    const col = (columns[c] ??= { min: total, max: -1, reserved: 0, stack: null });
    col.min = Math.min(col.min, total);
    col.reserved = Math.max(col.reserved, reserved);
    if (total > col.max) {
      col.max = total;
      col.stack = new Map(live);
    }
    if (total > best.bytes)
      best = {
        time_ns: event < 0 ? t0 : Math.max(t0, step.events[event].t),
        bytes: total,
        column: c,
        event: Math.max(0, event),
      };
  };
  const width = (t1 - t0) / px;
  for (let c = 0; c < px; c++) {
    const from = t0 + width * c;
    while (next < step.events.length && step.events[next].t <= from) {
      put(step.events[next].a, step.events[next].sign);
      total = totals[next];
      reserved = reserves[next];
      next++;
    }
    see(c, next - 1);
    while (next < step.events.length && step.events[next].t < from + width) {
      put(step.events[next].a, step.events[next].sign);
      total = totals[next];
      reserved = reserves[next];
      see(c, next);
      next++;
    }
  }
  const weight = new Map();
  for (const col of columns) for (const [k, b] of col.stack) weight.set(k, Math.max(weight.get(k) ?? 0, b));
  let keys =
    by === "category"
      ? CATEGORIES.filter((k) => weight.get(k))
      : [...weight.keys()].sort((a, b) => weight.get(b) - weight.get(a));
  const rest = by === "module" ? keys.slice(9) : [];
  if (rest.length) keys = [...keys.slice(0, 9), "(other modules)"];
  const value = (col, k) =>
    k === "(other modules)" ? sum(rest, (r) => col.stack.get(r) ?? 0) : (col.stack.get(k) ?? 0);
  return {
    t0,
    t1,
    px,
    min: columns.map((c) => c.min),
    max: columns.map((c) => c.max),
    reserved: run.device === "cpu" ? null : columns.map((c) => c.reserved),
    keys,
    stacks: keys.map((k) => columns.map((c) => value(c, k))),
    peak: best,
    exact: !run.coarse,
  };
}

export function moment(step, event, run) {
  const { totals, reserves, startTotal } = replay(step);
  const live = event < 0 ? step.startState : liveAt(step, event);
  const at = step.events[event];
  return {
    time_ns: at?.t ?? step.start,
    event,
    bytes: event < 0 ? startTotal : totals[event],
    reserved: run.device === "cpu" ? null : reserves[Math.max(0, event)],
    phase: at?.a.phase ?? "before",
    module: at?.a.module ?? null,
    operator: at?.a.operator ?? null,
    previous_event_ns: step.events[event - 1]?.t ?? null,
    next_event_ns: step.events[event + 1]?.t ?? null,
    previous_event: event > 0 ? event - 1 : null,
    next_event: event + 1 < step.events.length ? event + 1 : null,
    by_category: parts(live, "category"),
    by_module: parts(live, "module"),
    by_phase: parts(live, "phase"),
    largest: largest(live),
  };
}

export function lanes(step, t0, t1, px) {
  const least = (t1 - t0) / px;
  let omitted = 0;
  const hit = (s) => s.end_ns > t0 && s.start_ns < t1;
  const depths = [];
  for (const c of step.calls) {
    const span = { start_ns: c.start, end_ns: c.end, name: c.module, phase: c.phase };
    if (!hit(span)) continue;
    if (c.end - c.start < least) {
      omitted++;
      continue;
    }
    (depths[c.depth] ??= []).push(span);
  }
  return {
    t0,
    t1,
    steps: [{ start_ns: step.start, end_ns: step.end, name: `step ${step.step}`, phase: null }],
    phases: step.phases.map((p) => ({ start_ns: p.start, end_ns: p.end, name: p.name, phase: p.name })).filter(hit),
    modules: Array.from(depths, (d) => d ?? []),
    omitted,
  };
}

export function modules(run, step) {
  const { peak, totals } = replay(step);
  const live = liveAt(step, peak);
  const rows = run.model.map((m, id) => ({
    id,
    parent: m.parent,
    key: m.key,
    name: m.name,
    depth: m.depth,
    class_name: m.cls,
    kind: "module",
    own: {},
    inclusive: {},
    own_bytes: 0,
    inclusive_bytes: 0,
    highest: {},
    peak_inside_bytes: null,
    calls: 0,
    allocations: 0,
    allocated_bytes: 0,
    forward_ns: 0,
    backward_ns: 0,
  }));
  const byKey = new Map(rows.map((r) => [r.key, r]));
  const add = (key, kind) => {
    const r = {
      ...rows[0],
      id: rows.length,
      parent: null,
      key,
      name: key,
      depth: 0,
      class_name: null,
      kind,
      own: {},
      inclusive: {},
      highest: {},
      own_bytes: 0,
      inclusive_bytes: 0,
    };
    rows.push(r);
    byKey.set(key, r);
    return r;
  };
  for (const a of live) {
    const key = moduleKey(a);
    const row = byKey.get(key) ?? add(key, key.startsWith("outside:") ? "outside" : "unnamed");
    row.own[a.category] = (row.own[a.category] ?? 0) + a.bytes;
    row.own_bytes += a.bytes;
    for (let r = row; r; r = r.parent === null ? null : rows[r.parent]) {
      r.inclusive[a.category] = (r.inclusive[a.category] ?? 0) + a.bytes;
      r.inclusive_bytes += a.bytes;
    }
  }
  for (const c of step.calls) {
    const r = byKey.get(c.module);
    r.calls++;
    r[`${c.phase}_ns`] += c.end - c.start;
    const a = eventAt(step, c.start),
      b = eventAt(step, c.end);
    let top = 0;
    for (let i = Math.max(0, a); i <= b; i++) top = Math.max(top, totals[i]);
    r.peak_inside_bytes = Math.max(r.peak_inside_bytes ?? 0, top);
  }
  for (const e of step.events)
    if (e.sign > 0)
      for (let r = byKey.get(e.a.module); r; r = r.parent === null ? null : rows[r.parent]) {
        r.allocations++;
        r.allocated_bytes += e.a.bytes;
        r.highest[e.a.category] = Math.max(r.inclusive[e.a.category] ?? 0, r.highest[e.a.category] ?? 0, e.a.bytes);
      }
  for (const r of rows) for (const [k, b] of Object.entries(r.inclusive)) r.highest[k] = Math.max(b, r.highest[k] ?? 0);
  return { peak_bytes: totals[peak], rows };
}

export function compare(by, side, baseSide) {
  const at = ({ step }) => {
    const live = liveAt(step, replay(step).peak);
    return new Map(parts(live, by).map((p) => [p.key, { ...p, live: live.filter((a) => keyOf[by](a) === p.key) }]));
  };
  const [o, b] = [at(side), at(baseSide)];
  const rows = [...new Set([...o.keys(), ...b.keys()])].map((key) => {
    const [x, y] = [o.get(key), b.get(key)];
    const delta = (x?.bytes ?? 0) - (y?.bytes ?? 0);
    const cats = new Map();
    for (const a of x?.live ?? []) cats.set(a.category, (cats.get(a.category) ?? 0) + a.bytes);
    for (const a of y?.live ?? []) cats.set(a.category, (cats.get(a.category) ?? 0) - a.bytes);
    const top = [...cats].sort((p, q) => Math.abs(q[1]) - Math.abs(p[1]))[0];
    const status = !y ? "added" : !x ? "removed" : delta > 0 ? "grown" : delta < 0 ? "shrunk" : "same";
    return {
      key,
      status,
      base_bytes: y?.bytes ?? 0,
      other_bytes: x?.bytes ?? 0,
      delta_bytes: delta,
      base_count: y?.count ?? 0,
      other_count: x?.count ?? 0,
      category: delta === 0 ? null : (top?.[0] ?? null),
    };
  });
  rows.sort((p, q) => Math.abs(q.delta_bytes) - Math.abs(p.delta_bytes) || q.other_bytes - p.other_bytes);
  const brief = ({ run, step }) => ({
    run: run.run,
    worker: "rank0",
    step: step.step,
    device: run.device,
    peak_bytes: stats(step, run).peak_bytes,
    allocations: stats(step, run).allocations,
  });
  return { base: brief(baseSide), other: brief(side), delta_bytes: sum(rows, (r) => r.delta_bytes), rows };
}
