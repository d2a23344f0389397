import { expect, test } from "vitest";
import { matching } from "../../src/views/picker";

const RUNS = ["sweep/lr1/run7", "sweep/lr2/run7", "sweep/lr2/run17", "."];
const shown = (run: string): string => (run === "." ? "(top folder)" : run);

test("every word must be in the name, in any order and case", () => {
  expect(matching(RUNS, "RUN7 lr2", shown)).toEqual(["sweep/lr2/run7"]);
  expect(matching(RUNS, "lr2", shown)).toEqual(["sweep/lr2/run7", "sweep/lr2/run17"]);
  expect(matching(RUNS, "", shown)).toEqual(RUNS);
  expect(matching(RUNS, "TOP", shown)).toEqual(["."]);
  expect(matching(RUNS, "run9", shown)).toEqual([]);
});
