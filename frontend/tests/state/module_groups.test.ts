import { describe, expect, it } from "vitest";
import { isWithin, openedGroups, withClosed, withFlipped, withOpened } from "../../src/state/module_groups";

describe("groups of modules in the address", () => {
  it("stand one a line in the order in which they were opened", () => {
    const text = withOpened(withOpened(undefined, "layers.*.mlp"), "layers.0-15.mlp");
    expect(openedGroups(text)).toEqual(["layers.*.mlp", "layers.0-15.mlp"]);
    expect(openedGroups(undefined)).toEqual([]);
  });

  it("close with all that was opened inside them, and nothing else", () => {
    const text = ["head", "layers.*.mlp", "layers.0-15.mlp", "layers.*.attn"].join("\n");
    expect(openedGroups(withClosed(text, "layers.*.mlp"))).toEqual(["head", "layers.*.attn"]);
    expect(withClosed("head", "head")).toBeUndefined();
    expect(openedGroups(withClosed(text, "layers.0-15.mlp"))).toEqual(["head", "layers.*.mlp", "layers.*.attn"]);
  });

  it("flip alone where rows stand beside one another", () => {
    const both = withFlipped(withFlipped(undefined, "blocks.*"), "blocks.*.mlp");
    expect(openedGroups(withFlipped(both, "blocks.*"))).toEqual(["blocks.*.mlp"]);
    expect(withFlipped("blocks.*", "blocks.*")).toBeUndefined();
  });

  it("hold others by name, by number and by range", () => {
    expect(isWithin("tower.leaf", "tower")).toBe(true);
    expect(isWithin("tower", "tower.leaf")).toBe(false);
    expect(isWithin("layers.7.mlp", "layers.*")).toBe(true);
    expect(isWithin("layers.4-7.mlp", "layers.0-7.mlp")).toBe(true);
    expect(isWithin("layers.4-8.mlp", "layers.0-7.mlp")).toBe(false);
    expect(isWithin("layers.x", "layers.*")).toBe(false);
    expect(isWithin("a", "b")).toBe(false);
  });
});
