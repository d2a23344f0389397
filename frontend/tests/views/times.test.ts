import { describe, expect, it } from "vitest";
import type { StepAnswer } from "../../src/api/types";
import { aboutTimes } from "../../src/views/times";

const step = (kind: string, ...texts: string[]) =>
  ({ source: { kind }, notes: texts.map((text) => ({ level: "info", text })) }) as unknown as StepAnswer;

describe("what is said of times", () => {
  it("is nothing where they are times", () => expect(aboutTimes(step("torch.profiler", "Iteration 3."))).toBeNull());
  it("is that an estimate's are no GPU's", () => expect(aboutTimes(step("MemoryEstimator"))).toContain("not a GPU's"));
  it("is that an old snapshot counts entries", () =>
    expect(aboutTimes(step("snapshot", "cuda:0: the snapshot tells no times (PyTorch before 2.2)"))).toContain("one entry"));
});
