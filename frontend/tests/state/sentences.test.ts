import { describe, expect, it } from "vitest";
import type { CompareAnswer, CompareRow, StepAnswer } from "../../src/api/types";
import { unitFor } from "../../src/state/bytes";
import { changeSince, comparison, comparisonDetail, headline, largestModule, namesModules, plain } from "../../src/state/sentences";

const MiB = 2 ** 20;
const mib = unitFor(100 * MiB);

const step = (peak: object) =>
  ({
    step: 5,
    peak: {
      bytes: 113.4 * MiB,
      phase: "backward",
      module: "blocks.3.mlp",
      operator: "aten::mm",
      by_phase: [{ key: "forward", bytes: 1, count: 1 }],
      ...peak,
    },
  }) as unknown as StepAnswer;

describe("the headline", () => {
  it("calls a module of a Sequential, which is a number, a module", () =>
    expect(plain(headline(step({ module: "0.2" })))).toBe("Step 5 peaked at 113.4 MiB in backward, in module 0.2."));


  it("says what peaked, when and where", () =>
    expect(plain(headline(step({})))).toBe("Step 5 peaked at 113.4 MiB in backward, in blocks.3.mlp."));
  it("names the operator where no module owns the moment", () =>
    expect(plain(headline(step({ module: null })))).toBe("Step 5 peaked at 113.4 MiB in backward, in aten::mm."));
  it("says less where less is known", () =>
    expect(plain(headline(step({ module: null, operator: null, phase: null })))).toBe("Step 5 peaked at 113.4 MiB."));
  it("says nothing of a phase that nothing tells, and of an owner without a name", () => {
    const snapshot = { module: "(not named)", operator: null, phase: "other", by_phase: [{ key: "other", bytes: 1, count: 1 }] };
    expect(plain(headline(step(snapshot)))).toBe("Step 5 peaked at 113.4 MiB.");
    const named = { ...snapshot, operator: "aten::mm" };
    expect(plain(headline(step(named)))).toBe("Step 5 peaked at 113.4 MiB in aten::mm.");
  });
  it("tells that a moment is in no phase where the others are known", () =>
    expect(plain(headline(step({ phase: "other", module: "outside:aten::mm" })))).toBe(
      "Step 5 peaked at 113.4 MiB outside forward, backward and optimizer, in aten::mm.",
    ));
  it("calls what has no steps the recording", () => {
    const whole = { ...step({}), step: 0 };
    expect(plain(headline(whole, true))).toContain("The recording peaked at");
    expect(plain(headline(whole, false))).toContain("Step 0 peaked at");
  });
});

describe("the sentence on modules", () => {
  const peak = (by_module: [string, number][]) =>
    step({ by_module: by_module.map(([key, mib]) => ({ key, bytes: mib * MiB, count: 1, categories: {} })), bytes: 80 * MiB });
  it("names what holds most, repeated layers together", () =>
    expect(plain(largestModule(peak([["head", 30], ["blocks.0.mlp", 20], ["blocks.1.mlp", 20]]), false)!)).toBe(
      "At the peak of step 5, 40.00 MiB of 80.00 MiB (50.0 %) are in blocks.*.mlp itself.",
    ));
  it("may name what no module owns", () =>
    expect(plain(largestModule(peak([["outside:cross_entropy_loss", 60], ["head", 20]]), false)!)).toBe(
      "At the peak of step 5, 60.00 MiB of 80.00 MiB (75.0 %) are in cross_entropy_loss, outside the modules.",
    ));
  it("says nothing where nobody is named", () => expect(largestModule(peak([["(not named)", 80]]), false)).toBeNull());
});

const side = (step: number, peak: number, allocations: number, run = "a") => ({
  run,
  worker: "w",
  device: "cpu",
  step,
  peak_bytes: peak,
  allocations,
});
const change = (key: string, delta: number): CompareRow => ({
  key,
  label: key,
  status: delta > 0 ? "grown" : delta < 0 ? "shrunk" : "same",
  base_bytes: 50 * MiB,
  other_bytes: 50 * MiB + delta,
  delta_bytes: delta,
  base_count: 1,
  other_count: 1,
  category: delta === 0 ? null : "temporary",
  category_delta_bytes: delta,
});
const compare = (deltas: Record<string, number>, run = "a"): CompareAnswer => {
  const total = Object.values(deltas).reduce((s, d) => s + d, 0);
  return {
    base: side(41, 100 * MiB, 6768),
    other: side(42, 100 * MiB + total, 6769, run),
    delta_bytes: total,
    rows: Object.entries(deltas).map(([k, d]) => change(k, d)),
  };
};

describe("what changed", () => {
  it("lies all in one module", () => {
    const answer = compare({ loss: 3 * MiB, head: 0 });
    expect(plain(comparison(answer, mib))).toBe("Step 42 peaks 3.00 MiB (3.0 %) above step 41.");
    expect(plain(comparisonDetail(answer, mib))).toBe(
      "All of it in loss, as temporary memory. 6,769 allocations against 6,768.",
    );
    expect(plain(changeSince(answer, mib))).toBe("3.00 MiB more than step 41. All of it in loss, as temporary memory.");
  });
  it("is of one category, mostly of one, or of several", () => {
    const answer = compare({ loss: 36 * MiB });
    const told = (of: number) =>
      changeSince({ ...answer, rows: [{ ...change("loss", 36 * MiB), category_delta_bytes: of * MiB }] }, mib);
    expect(plain(told(24))).toBe("36.00 MiB more than step 41. All of it in loss, mostly as temporary memory.");
    expect(plain(told(12))).toBe("36.00 MiB more than step 41. All of it in loss.");
  });
  it("names the rows that changed most, and sums the others", () => {
    expect(plain(changeSince(compare({ loss: 3 * MiB, head: MiB }), mib))).toBe(
      "4.00 MiB more than step 41. Larger: loss +3.00 MiB (temporary), head +1.00 MiB (temporary).",
    );
    const many = Object.fromEntries([9, 8, 7, 6, 2, 1].map((mib, i) => [`part${i}`, mib * MiB]));
    expect(plain(changeSince(compare(many), mib))).toBe(
      "33.00 MiB more than step 41. Larger: part0 +9.00 MiB (temporary), part1 +8.00 MiB (temporary), " +
        "part2 +7.00 MiB (temporary), part3 +6.00 MiB (temporary). 2 others +3.00 MiB.",
    );
  });
  it("is in one smaller unit where all of it is less than a tenth of the page's", () => {
    const gib = unitFor(1024 * MiB);
    expect(plain(changeSince(compare({ loss: 16 * MiB, head: MiB / 8, norm: -4 * MiB }), gib))).toBe(
      "12.13 MiB more than step 41. Larger: loss +16.00 MiB (temporary), head +0.13 MiB (temporary). " +
        "Smaller: norm −4.00 MiB (temporary).",
    );
    expect(plain(comparison(compare({ loss: 16 * MiB }), gib))).toBe("Step 42 peaks 16.00 MiB (16.0 %) above step 41.");
    expect(plain(changeSince(compare({ loss: 20 * MiB, head: 300 * MiB }), gib))).toBe(
      "0.31 GiB more than step 41. Larger: head +0.29 GiB (temporary), loss +0.02 GiB (temporary).",
    );
  });
  it("says what moved against it", () => {
    expect(plain(changeSince(compare({ loss: 8 * MiB, head: -7 * MiB }), mib))).toBe(
      "1.00 MiB more than step 41. Larger: loss +8.00 MiB (temporary). Smaller: head −7.00 MiB (temporary).",
    );
  });
  it("says why a step takes less: what is gone before what is smaller, and last what is larger", () => {
    const rows: CompareRow[] = [
      change("up", -24 * MiB),
      { ...change("act", -20 * MiB), other_bytes: 0, status: "removed" },
      { ...change("loss", 6 * MiB), base_bytes: 0, status: "added" },
    ];
    expect(plain(changeSince({ ...compare({ all: -38 * MiB }), rows }, mib))).toBe(
      "38.00 MiB less than step 41. Gone: act −20.00 MiB (temporary). Smaller: up −24.00 MiB (temporary). " +
        "New: loss +6.00 MiB (temporary).",
    );
    const alone = { ...compare({ act: -20 * MiB }), rows: [rows[1]!] };
    expect(plain(changeSince(alone, mib))).toBe(
      "20.00 MiB less than step 41. All of it in act, as temporary memory, which is gone.",
    );
  });
  it("may be less", () =>
    expect(plain(comparison(compare({ loss: -2 * MiB }), mib))).toBe("Step 42 peaks 2.00 MiB (2.0 %) below step 41."));
  it("may be nothing", () => {
    expect(plain(changeSince(compare({ loss: 0 }), mib))).toBe("The same as step 41, to the byte.");
    expect(plain(changeSince(compare({ loss: MiB, head: -MiB }), mib))).toBe(
      "The same total as step 41, though parts of it moved.",
    );
    expect(plain(comparisonDetail(compare({ loss: MiB, head: -MiB }), mib))).toBe(
      "2 rows differ, and the differences cancel. 6,769 allocations against 6,768.",
    );
  });
  it("names the runs where they differ", () =>
    expect(plain(comparison(compare({ loss: MiB }, "b"), mib))).toBe(
      "Step 42 of b peaks 1.00 MiB (1.0 %) above step 41 of a.",
    ));
  it("names a recording without steps by its run", () => {
    const answer = compare({ loss: MiB }, "b");
    const told = { ...answer, base: { ...answer.base, step: 0, alone: true }, other: { ...answer.other, step: 0, alone: true } };
    expect(plain(comparison(told, mib))).toBe("Recording b peaks 1.00 MiB (1.0 %) above recording a.");
  });
  it("lies in a category where the rows are categories", () => {
    const answer = compare({ optimizer_state: MiB });
    const told = { ...answer, rows: answer.rows.map((row) => ({ ...row, category: null })) };
    expect(plain(changeSince(told, mib))).toBe("1.00 MiB more than step 41. All of it in optimizer state.");
  });
  it("says of what no module owns that it is outside, and of what nobody named only what it is", () => {
    expect(plain(changeSince(compare({ "outside:cross_entropy_loss": MiB }), mib))).toBe(
      "1.00 MiB more than step 41. All of it in cross_entropy_loss, outside the modules, as temporary memory.",
    );
    expect(plain(changeSince(compare({ "(not named)": MiB }), mib))).toBe(
      "1.00 MiB more than step 41. All of it as temporary memory.",
    );
  });
  it("knows which side names modules", () => {
    const added: CompareRow = { ...change("blocks.0", MiB), base_bytes: 0, status: "added" };
    expect(namesModules([added], "other_bytes")).toBe(true);
    expect(namesModules([added, change("(not named)", 0), change("outside:aten::mm", 0)], "base_bytes")).toBe(false);
  });
});
