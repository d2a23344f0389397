import { describe, expect, it } from "vitest";
import type { Nodes } from "../../src/api/types";
import { layFlame, neighbor, nodeAt, toneOf } from "../../src/draw/flame";

/** all 100: a 60 (c 45, d 15), b 40. */
const nodes: Nodes = {
  id: [0, 1, 2, 3, 7],
  parent: [-1, 0, 1, 1, 0],
  label: [-1, 0, 1, 2, 3],
  run: [[], [0], [1], [2], [3]],
  bytes: [100, 60, 45, 15, 40],
  count: [4, 2, 1, 1, 2],
  own: [0, 0, 45, 15, 40],
  tensor: [null, null, null, null, null],
  found: [0, 0, 0, 0, 0],
};

describe("a flame graph", () => {
  it("is as wide as its bytes, callees under their caller", () => {
    const flame = layFlame(nodes, 0);
    expect([...flame.left]).toEqual([0, 0, 0, 0.45, 0.6]);
    expect([...flame.right]).toEqual([1, 0.6, 0.45, 0.6, 1]);
    expect(flame.levels).toEqual([[0], [1, 4], [2, 3]]);
  });
  it("gives the whole width to what is looked at and to what lies above it", () => {
    const below = { ...nodes, id: [0, 1, 2, 3], parent: [-1, 0, 1, 1], bytes: [100, 60, 45, 15] };
    const flame = layFlame(below, 1);
    expect([...flame.left]).toEqual([0, 0, 0, 0.75]);
    expect([...flame.right]).toEqual([1, 1, 0.75, 1]);
  });
  it("knows what is under a point, and where nothing is", () => {
    const flame = layFlame(nodes, 0);
    expect([nodeAt(flame, 0, 0.99), nodeAt(flame, 1, 0.7), nodeAt(flame, 2, 0.5)]).toEqual([0, 4, 3]);
    expect([nodeAt(flame, 2, 0.8), nodeAt(flame, 9, 0.1)]).toEqual([-1, -1]);
  });
  it("is walked by the arrow keys", () => {
    const flame = layFlame(nodes, 0);
    const walk = (from: number, ...keys: string[]): number => keys.reduce((at, key) => neighbor(flame, nodes, at, key), from);
    expect(walk(-1, "ArrowDown", "ArrowDown")).toBe(1);
    expect(walk(0, "ArrowDown", "ArrowDown", "ArrowRight")).toBe(3);
    expect(walk(3, "ArrowRight", "ArrowUp", "ArrowRight")).toBe(4);
    expect(walk(4, "ArrowDown", "ArrowRight")).toBe(4);
  });
  it("gives a file one tone", () => {
    expect(toneOf("model.py", 4)).toBe(toneOf("model.py", 4));
    expect(new Set(Array.from({ length: 40 }, (_, i) => toneOf(`file${i}.py`, 4))).size).toBe(4);
  });
});

describe("a flame graph of a whole tree", () => {
  it("leaves out what is beside what is looked at", () => {
    const flame = layFlame(nodes, 3);
    expect(flame.levels).toEqual([[0], [1], [3]]);
    expect([flame.left[3], flame.right[3]]).toEqual([0, 1]);
    expect(nodeAt(flame, 1, 0.9)).toBe(1);
  });
});
