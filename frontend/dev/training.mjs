// An imagined training step, event by event, so that every sum the fixture answers is exact.

export const CATEGORIES = [
  "parameter",
  "buffer",
  "optimizer_state",
  "gradient",
  "activation",
  "autograd_detail",
  "recomputed",
  "temporary",
  "workspace",
  "input",
  "communication",
  "unknown",
];

/** Small repeatable random numbers. */
export function random(seed) {
  let s = seed >>> 0 || 1;
  return () => (s = (Math.imul(s, 1664525) + 1013904223) >>> 0) / 2 ** 32;
}

/** The modules of a transformer: [{key, name, cls, depth, parent, params (bytes)}], parents first. */
export function transformer({
  layers,
  width,
  root = "TransformerLM",
  inner = ["ln1", "attn", "ln2", "mlp"],
  weird = [],
}) {
  const list = [{ key: "", name: root, cls: root, depth: 0, parent: null, params: 0 }];
  const add = (key, cls, parent, params) => {
    list.push({ key, name: key.split(".").at(-1), cls, depth: list[parent].depth + 1, parent, params });
    return list.length - 1;
  };
  add("embed", "Embedding", 0, width * width * 16);
  const blocks = add("blocks", "ModuleList", 0, 0);
  for (let i = 0; i < layers; i++) {
    const block = add(`blocks.${i}`, "Block", blocks, 0);
    for (const part of inner) {
      const big = part === "mlp" ? 8 : part === "attn" ? 4 : 0.01;
      add(
        `blocks.${i}.${part}`,
        { mlp: "MLP", attn: "Attention" }[part] ?? "LayerNorm",
        block,
        Math.round(width * width * big) * 2 + 512,
      );
    }
  }
  add("norm", "LayerNorm", 0, width * 4);
  add("head", "Linear", 0, width * width * 16);
  for (const name of weird) add(name, "Weird", 0, 4096);
  return list;
}

/** One step's events, module calls and phases for a model. */
export function trainStep(model, { start, step, batch, firstStep, leak = 0, seed, before, unknown = true }) {
  const rand = random(seed);
  const events = [];
  const calls = [];
  const phases = [];
  let now = start;
  let address = 0x7f0000000000 + step * 0x10000000;
  const tick = (ns) => (now += Math.round(ns * (0.6 + rand() * 0.8)));
  const alloc = (bytes, category, module, operator, phase, name = null) => {
    const a = {
      bytes: Math.max(512, Math.round(bytes)),
      category,
      module,
      operator,
      phase,
      name,
      born: now,
      freed: null,
      address: (address += 512),
    };
    events.push({ t: now, a, sign: 1 });
    return a;
  };
  const free = (a) => {
    a.freed = now;
    events.push({ t: now, a, sign: -1 });
  };
  const live = [...before];
  if (firstStep)
    for (const m of model)
      if (m.params)
        live.push({
          bytes: m.params,
          category: "parameter",
          module: m.key,
          operator: null,
          phase: "before",
          name: `${m.key}.weight`,
          born: null,
          freed: null,
          address: (address += 512),
        });
  const startState = [...live];

  tick(40000);
  const input = alloc(batch * 4096, "input", null, "aten::to", "other");
  tick(30000);
  phases.push({ name: "forward", start: now });
  const kept = [];
  const order = model.map((m, i) => ({ m, i })).filter(({ i }) => !model.some((c) => c.parent === i));
  const open = [];
  const enter = (i, phase) => {
    const c = { module: model[i].key, depth: model[i].depth, start: now, end: 0, phase };
    calls.push(c);
    open.push({ i, c });
  };
  const leaveTo = (i) => {
    while (open.length && !within(model, i, open.at(-1).i)) {
      tick(400);
      open.pop().c.end = now;
    }
  };
  const path = (i) => {
    const p = [];
    for (let k = i; k !== null; k = model[k].parent) p.unshift(k);
    return p;
  };
  const walk = (list, phase, run) => {
    for (const { m, i } of list) {
      leaveTo(i);
      for (const k of path(i)) if (!open.some((o) => o.i === k) && model[k].cls !== "ModuleList") enter(k, phase);
      tick(900);
      run(m, i);
      tick(700);
    }
    while (open.length) {
      tick(500);
      open.pop().c.end = now;
    }
  };
  walk(order, "forward", (m) => {
    const size = batch * (m.cls === "MLP" ? 5200 : m.cls === "Attention" ? 6400 : m.key === "head" ? 9000 : 1300);
    for (let n = 0; n < 3; n++) {
      const tmp = alloc(size * (0.2 + rand() * 0.5), "temporary", m.key, "aten::mm", "forward");
      tick(1400);
      kept.push({
        m,
        a: alloc(
          size * (n === 1 ? 0.6 : 0.22),
          n === 2 ? "autograd_detail" : "activation",
          m.key,
          n === 1 ? "aten::gelu" : "aten::addmm",
          "forward",
        ),
      });
      tick(1600);
      free(tmp);
      tick(300);
    }
  });
  const work = alloc((8 * 2 ** 20) / 16, "workspace", null, "aten::mm", "forward");
  if (unknown) alloc(120000, "unknown", null, "aten::empty", "other");
  phases.at(-1).end = now;
  phases.push({ name: "backward", start: now });
  const grads = [];
  const loss = alloc(batch * 22000, "temporary", "head", "aten::_log_softmax_backward_data", "backward");
  tick(3000);
  walk([...order].reverse(), "backward", (m) => {
    for (let n = 0; n < 2; n++) {
      const tmp = alloc(batch * 2300 * (0.4 + rand()), "temporary", m.key, "aten::mm", "backward");
      tick(1500);
      free(tmp);
      tick(200);
    }
    if (m.params) grads.push(alloc(m.params, "gradient", m.key, "aten::mm", "backward", `${m.key}.weight.grad`));
    tick(900);
    for (const k of kept)
      if (k.m === m) {
        free(k.a);
        tick(250);
      }
    if (m.key === "norm") free(loss);
  });
  phases.at(-1).end = now;
  tick(9000);
  phases.push({ name: "optimizer", start: now });
  for (const m of model) {
    if (!m.params) continue;
    if (firstStep)
      for (const s of ["exp_avg", "exp_avg_sq"])
        live.push(alloc(m.params, "optimizer_state", m.key, "aten::zeros_like", "optimizer", `${m.key}.weight.${s}`));
    const tmp = alloc(m.params * 0.7, "temporary", m.key, "aten::addcdiv_", "optimizer");
    tick(900);
    free(tmp);
  }
  tick(4000);
  for (const g of grads) free(g);
  free(work);
  free(input);
  if (leak) live.push(alloc(leak, "activation", "head", "aten::detach", "optimizer"));
  for (const e of events) if (e.sign > 0 && e.a.category === "unknown") live.push(e.a);
  phases.at(-1).end = now;
  tick(20000);
  return { step, start, end: now, events, calls, phases, startState, after: live.map((a) => ({ ...a, born: null })) };
}

function within(model, i, ancestor) {
  for (let k = i; k !== null; k = model[k].parent) if (k === ancestor) return true;
  return false;
}
