import { describe, expect, it } from "vitest";
import { deltasTo, partChanges } from "../../src/state/part_changes";

const parts = (sizes: Record<string, number>) =>
  Object.entries(sizes).map(([key, bytes]) => ({ key, label: key, bytes, count: 1 }));

describe("the parts of two moments", () => {
  const now = parts({ activation: 30, gradient: 5 });
  const changes = partChanges(deltasTo(now, parts({ activation: 50, temporary: 8 })));
  it("differ part by part", () =>
    expect(["activation", "gradient", "temporary", "input"].map(changes.of)).toEqual([-20, 5, -8, 0]));
  it("that are gone have no bytes", () => expect(changes.gone(now).map((p) => [p.key, p.bytes])).toEqual([["temporary", 0]]));
  it("sum to the whole change, whichever are shown", () => {
    expect(changes.rest([])).toBe(35 - 58);
    expect(changes.rest([{ key: "gradient" }]) + 5).toBe(35 - 58);
  });
});

describe("parts of which some are not listed", () => {
  const changes = partChanges(deltasTo(parts({ a: 10, b: 4 }), parts({ a: 7, "(others)": 3 })));
  it("say nothing of what may be among those", () => {
    expect(changes.of("a")).toBe(3);
    expect(changes.of("b")).toBeUndefined();
    expect(changes.gone(parts({ a: 10 }))).toEqual([]);
  });
  it("still sum to the whole", () => expect(changes.rest([{ key: "a" }])).toBe(1));
});
