import { describe, expect, it } from "vitest";
import type { AdviceAnswer, Finding } from "../../src/api/types";
import { adviceHeadline, linkTo, ruleName, stepsOf, titleOf, unfound } from "../../src/state/advice";
import { patched } from "../../src/state/route";
import { plain } from "../../src/state/sentences";

function answer(levels: Finding["level"][], steps = [2, 3, 4]): AdviceAnswer {
  const findings = levels.map((level) => ({ level }) as Finding);
  return { steps, watched_steps: 0, findings, judgements: [], peak: null };
}

describe("the headline", () => {
  it.each([
    [[], "Nothing to fix in steps 2 to 4."],
    [["option"], "Nothing to fix, and 1 option that has a price, in steps 2 to 4."],
    [["problem"], "1 problem to fix in steps 2 to 4."],
    [["problem", "problem", "option", "option"], "2 problems to fix and 2 options that have a price, in steps 2 to 4."],
  ] as [Finding["level"][], string][])("of %s", (levels, words) => expect(plain(adviceHeadline(answer(levels)))).toBe(words));

  it("says that there is nothing to fix only where every rule was judged", () => {
    const judgements = [{ verdict: "fine" }, { verdict: "fine" }, { verdict: "not judged" }] as AdviceAnswer["judgements"];
    expect(plain(adviceHeadline({ ...answer([]), judgements }))).toBe("No problem found in steps 2 to 4.");
  });

  it("does not call well what could hardly be judged", () => {
    const judgements = [{ verdict: "fine" }, { verdict: "not judged" }, { verdict: "not judged" }] as AdviceAnswer["judgements"];
    const told = { ...answer([], [0]), judgements };
    expect(plain(adviceHeadline(told, true))).toBe("The recording lacks what most rules need.");
  });

  it("counts the steps of a monitor, whose figures judge growth alone", () => {
    const watched = { ...answer([], []), watched_steps: 1000 };
    const judgements = [{ verdict: "fine" }, { verdict: "not judged" }, { verdict: "not judged" }] as AdviceAnswer["judgements"];
    expect(plain(adviceHeadline({ ...watched, judgements }))).toBe("No problem found in 1,000 watched steps.");
    const open = { ...watched, judgements: judgements.slice(1) };
    expect(plain(adviceHeadline(open))).toBe("The recording lacks what most rules need.");
  });

  it.each([
    [[], "this recording"],
    [[5], "step 5"],
    [[5, 6], "steps 5 and 6"],
    [[2, 4, 9], "steps 2, 4 and 9"],
    [[1, 3, 5, 7, 9, 11, 13], "7 steps from 1 to 13"],
  ] as [number[], string][])("names steps %s", (steps, words) => expect(stepsOf(steps)).toBe(words));
});

describe("a title", () => {
  it("shows its name as a name", () =>
    expect(titleOf({ title: "Recompute blocks.* in backward.", subject: "blocks.*" })).toEqual([
      "Recompute ",
      { name: "blocks.*" },
      " in backward.",
    ]));

  it("names what no module owns in the words of all views", () =>
    expect(titleOf({ title: "It grows: outside:ones · aten::ones keeps it.", subject: "outside:ones · aten::ones" })[1]).toEqual({
      name: "outside · ones · aten::ones",
    }));

  it("has a source line without its folder", () =>
    expect(titleOf({ title: "/a/b/m.py:20 (f) grows.", subject: "/a/b/m.py:20 (f)" })).toEqual([
      { name: "m.py:20 (f)", title: "/a/b/m.py:20 (f)" },
      " grows.",
    ]));

  it("without a name, or with one that it does not hold, is plain", () => {
    expect(titleOf({ title: "Gradients stay.", subject: "" })).toEqual(["Gradients stay."]);
    expect(titleOf({ title: "Gradients stay.", subject: "x" })).toEqual(["Gradients stay."]);
  });
});

describe("a link", () => {
  it("leads to its view and state, and leaves behind what another view had", () => {
    const to = linkTo({ view: "stacks", state: { step: "5", event: "12", search: "run" } })!;
    const route = patched({ view: "advice", run: "a", step: "2", find: "old", t0: "1", t1: "9", sort: "x" }, to);
    expect(route).toEqual({ view: "stacks", run: "a", step: "5", event: "12", search: "run" });
  });

  it("keeps its event where the step stays", () => {
    const to = linkTo({ view: "allocator", state: { step: "5", event: "12" } })!;
    expect(patched({ view: "advice", step: "5" }, to)).toEqual({ view: "allocator", step: "5", event: "12" });
  });

  it("takes no key that is not ours, and leads nowhere where there is no such view", () => {
    const hostile = { view: "modules", state: JSON.parse('{"__proto__": "x", "evil": "y", "find": "a"}') };
    expect(patched({ view: "advice" }, linkTo(hostile)!)).toEqual({ view: "modules", find: "a" });
    expect(linkTo({ view: "__proto__", state: {} })).toBeNull();
  });
});

it("what is fine comes before what could not be judged, and what was found not at all", () => {
  const told = (kind: string, verdict: "found" | "fine" | "not judged") => ({ kind, device: "cpu", verdict, why: "" });
  const judgements = [told("a", "not judged"), told("b", "found"), told("c", "fine"), told("d", "not judged")];
  expect(unfound({ ...answer([]), judgements }).map((one) => one.kind)).toEqual(["c", "a", "d"]);
});

it("a rule of a newer server keeps a readable name", () => expect(ruleName("some_new_rule")).toBe("some new rule"));
