import { describe, expect, it } from "vitest";
import { HELD_BY_A_LOCAL } from "../../src/api/contract";
import { allocationName, cellText, headAndTail, moduleLabel, shortened, visible } from "../../src/state/names";

describe("a hostile name", () => {
  it("stays on one line", () => expect(visible("a\nb\tc")).toBe("a⏎b⇥c"));
  it("shows its control characters", () => expect(visible("a\u0000b\u001b")).toBe("a\\x00b\\x1b"));
  it("cannot turn the text around or hide in it", () => expect(visible("a\u202eb\u200bc")).toBe("a\ufffdb\ufffdc"));
  it("is text, markup and all", () => expect(visible("<script>")).toBe("<script>"));
  it("of ten thousand characters fits a cell", () => expect(cellText("x".repeat(10_000))).toHaveLength(160));
});

it("a long name keeps both ends", () => {
  expect(shortened("abcdefghij", 5)).toBe("ab…ij");
  expect(shortened("abc", 3)).toBe("abc");
});

it("a cell cuts before the part that tells names apart", () => {
  expect(headAndTail("encoder.layers.11.attention")).toEqual(["encoder", ".layers.11.attention"]);
  expect(headAndTail("1.weight (gradient)")).toEqual(["1.weight (", "gradient)"]);
  expect(headAndTail("/home/me/project/models.py:174 (forward)")).toEqual([
    "/home/me/project",
    "/models.py:174 (forward)",
  ]);
  expect(headAndTail("short")).toEqual(["short", ""]);
  expect(headAndTail(`${"x".repeat(60)}.layers.3`)).toEqual(["x".repeat(60), ".layers.3"]);
  expect(headAndTail("x".repeat(30))).toEqual(["x".repeat(15), "x".repeat(15)]);
});

it("an allocation goes by its own name, else its module, else its operator", () => {
  const known = { name: "fc.weight", module: "fc", operator: "aten::linear" };
  expect(allocationName(known)).toBe("fc.weight");
  expect(allocationName({ ...known, name: null })).toBe("fc");
  expect(allocationName({ ...known, name: HELD_BY_A_LOCAL })).toBe("fc");
  expect(allocationName({ ...known, name: null, module: "" })).toBe("(root)");
  expect(allocationName({ ...known, name: null, module: "(not named)" })).toBe("aten::linear");
  expect(allocationName({ name: null, module: "(not named)", operator: null })).toBeNull();
});

it("module keys that are no modules are words", () => {
  expect(moduleLabel("")).toBe("(root)");
  expect(moduleLabel("outside:aten::mm")).toBe("outside · aten::mm");
  expect(moduleLabel("blocks.0")).toBe("blocks.0");
});
