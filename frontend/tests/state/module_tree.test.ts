import { describe, expect, it } from "vitest";
import type { ModuleRow } from "../../src/api/types";
import { matcher, matches, visibleRows, wildcard } from "../../src/state/module_rows";
import { buildFlat, buildTree } from "../../src/state/module_tree";
import { columnsOf } from "../../src/views/modules/columns";

const row = (
  id: number,
  parent: number | null,
  key: string,
  own: number,
  inclusive: number,
  cls = "Linear",
  calls = 1,
): ModuleRow => ({
  id,
  parent,
  key,
  name: key,
  depth: 0,
  class_name: cls,
  kind: "module",
  own: { parameter: own },
  inclusive: { parameter: inclusive },
  own_bytes: own,
  inclusive_bytes: inclusive,
  highest: { parameter: inclusive + id },
  highest_ns: 1000 * id,
  highest_in_forward: { bytes: 100 + id, start_ns: id, end_ns: id + 5 },
  highest_in_backward: null,
  peak_inside_bytes: 100 + id,
  calls,
  allocations: 1,
  allocated_bytes: 1,
  forward_ns: 10,
  backward_ns: 20,
});
/** root { blocks { 0 { mlp }, 1 { mlp } }, head } */
const rows = [
  row(0, null, "", 1, 15, "Model"),
  row(1, 0, "blocks", 0, 10, "ModuleList", 0),
  row(2, 1, "blocks.0", 1, 5, "Block"),
  row(3, 2, "blocks.0.mlp", 4, 4),
  row(4, 1, "blocks.1", 1, 5, "Block"),
  row(5, 4, "blocks.1.mlp", 4, 4),
  row(6, 0, "head", 4, 4),
];
const keys = (list: { node: { key: string } }[]) => list.map((r) => r.node.key);

describe("the tree", () => {
  it("has no column in which no row knows a value, and keeps one that only a closed row knows", () => {
    const ids = (list: ModuleRow[]): string[] => columnsOf(buildTree(list, true), "peak").map((column) => column.id);
    const untimed = rows.map((each) => ({ ...each, forward_ns: 0, backward_ns: 0, highest_in_forward: null }));
    expect(ids(untimed).slice(-3)).toEqual(["temporaries", "other", "allocations"]);
    expect(ids(untimed.with(5, { ...untimed[5]!, backward_ns: 7 })).slice(-2)).toEqual(["allocations", "backward"]);
    expect(ids(rows).slice(-4)).toEqual(["in-forward", "allocations", "forward", "backward"]);
  });

  it("shows what an open row holds itself, so that the rows inside sum to it", () => {
    const shown = visibleRows(buildTree(rows, false), () => true, null, null, true);
    const inside = (key: string, depth: number): number => {
      const at = shown.findIndex((r) => r.node.key === key && !r.own);
      const end = shown.findIndex((r, i) => i > at && r.depth < depth);
      return shown.slice(at + 1, end < 0 ? undefined : end).filter((r) => r.depth === depth).reduce((s, r) => s + r.node.bytes, 0);
    };
    expect(inside("", 1)).toBe(15);
    expect(inside("blocks.1", 3)).toBe(5);
    expect(shown.filter((r) => r.own).map((r) => [r.node.key, r.node.bytes, r.node.atPeak])).toEqual([
      ["", 1, { parameter: 1 }],
      ["blocks.0", 1, { parameter: 1 }],
      ["blocks.1", 1, { parameter: 1 }],
    ]);
  });
  it("puts many operators outside of all modules under one row", () => {
    const outside = ["a", "b", "c", "d"].map((name, i) => ({
      ...row(10 + i, null, `outside:${name}`, i, i, "", 0),
      kind: "outside" as const,
    }));
    const roots = buildTree([...rows, ...outside], true);
    expect(roots.map((node) => [node.key, node.bytes, node.children.length])).toEqual([
      ["", 15, 2],
      ["outside:", 6, 4],
    ]);
    expect(buildTree([...rows, ...outside.slice(1)], true)).toHaveLength(4);
    expect(buildTree(outside, true)).toHaveLength(4);
  });
  it("says on a list of equal layers how many there are", () => {
    const blocks = buildTree(rows, true)[0]!.children[0]!;
    expect([blocks.key, blocks.layers, blocks.children.length, blocks.bytes]).toEqual(["blocks", 2, 2, 10]);
  });
  it("puts equal layers beside others under a row of their own, and their highest is that of one of them", () => {
    const mixed = [
      row(0, null, "net", 0, 9, "Net"),
      row(1, 0, "net.0", 1, 3, "Block"),
      row(2, 1, "net.0.fc", 2, 2),
      row(3, 0, "net.1", 1, 3, "Block"),
      row(4, 3, "net.1.fc", 2, 2),
      row(5, 0, "net.2", 3, 3, "Norm"),
    ];
    const [folded, norm] = buildTree(mixed, true)[0]!.children;
    expect([folded!.key, folded!.layers, folded!.bytes, folded!.forwardNs]).toEqual(["net.*", 2, 6, 20]);
    expect([folded!.highest, folded!.highestNs, folded!.inForward!.bytes]).toEqual([{ parameter: 6 }, 3000, 103]);
    expect(norm!.key).toBe("net.2");
  });
  it("leaves the layers of a Sequential apart, which differ in class or in size", () => {
    const layers = (kinds: [number, string][]) => [
      row(0, null, "net", 0, 0, "Sequential"),
      ...kinds.map(([own, cls], n) => row(n + 1, 0, `net.${n}`, own, own, cls)),
    ];
    const unlike = layers([[8, "Linear"], [0, "ReLU"], [8, "Linear"], [0, "ReLU"]]);
    expect(keys(buildTree(unlike, true)[0]!.children.map((node) => ({ node })))).toEqual(["net.0", "net.1", "net.2", "net.3"]);
    expect(buildTree(layers([[8, "Linear"], [4, "Linear"], [2, "Linear"], [1, "Linear"]]), true)[0]!.children).toHaveLength(4);
    expect(buildTree(layers([[8, "Linear"], [8, "Linear"], [8, "Linear"], [8, "Linear"]]), true)[0]!.layers).toBeNull();
    expect(buildFlat(unlike, true)).toHaveLength(5);
  });
  it("stars the number that differs, not the first", () => {
    const experts = [0, 1, 2, 3].map((n) => row(n + 1, 0, `h.0.experts.${n}`, 1, 1));
    const [folded] = buildTree([row(0, null, "h.0.experts", 0, 4, "Router"), ...experts], true)[0]!.children;
    expect([folded!.key, folded!.layers]).toEqual(["h.0.experts.*", 4]);
  });
  it("without folding is as the model is", () => expect(buildTree(rows, false)[0]!.children[0]!.layers).toBeNull());
});

describe("the flat list", () => {
  it("sums to the peak", () => {
    expect(buildFlat(rows, false).reduce((s, n) => s + n.bytes, 0)).toBe(15);
    expect(buildFlat(rows, true).reduce((s, n) => s + n.bytes, 0)).toBe(15);
  });
  it("folds layers over the whole model", () => {
    expect(buildFlat(rows, true).map((n) => [n.key, n.layers])).toEqual([
      ["", null],
      ["blocks", null],
      ["blocks.*", 2],
      ["blocks.*.mlp", 2],
      ["head", null],
    ]);
  });
});

describe("the visible rows", () => {
  const open = () => true;
  it("are the open ones, parents first", () =>
    expect(keys(visibleRows(buildTree(rows, false), (_, d) => d < 1, null, null))).toEqual(["", "blocks", "head"]));
  it("sort within their parent", () => {
    const byBytes = { value: (n: { bytes: number }) => n.bytes, descending: false };
    expect(keys(visibleRows(buildTree(rows, false), (_, d) => d < 1, byBytes, null))).toEqual(["", "head", "blocks"]);
  });
  it("of a filter are the matches and the way to them", () => {
    expect(keys(visibleRows(buildTree(rows, false), () => false, null, matcher("blocks.*.mlp")))).toEqual([
      "",
      "blocks",
      "blocks.0",
      "blocks.0.mlp",
      "blocks.1",
      "blocks.1.mlp",
    ]);
    expect(matches(buildTree(rows, false), matcher("blocks.*.mlp")!)).toEqual({ count: 2, bytes: 8 });
    expect(visibleRows(buildTree(rows, false), open, null, matcher("nothing"))).toEqual([]);
  });
  it("of matches inside matches count their bytes once", () =>
    expect(matches(buildTree(rows, false), matcher("blocks")!)).toEqual({ count: 5, bytes: 10 }));
});

describe("a wildcard", () => {
  it("covers the whole name", () => {
    expect(wildcard("blocks.*.attn", "blocks.12.attn")).toBe(true);
    expect(wildcard("blocks.*.attn", "blocks.12.attn.q")).toBe(false);
    expect(wildcard("*", "")).toBe(true);
    expect(wildcard("b?d", "bad")).toBe(true);
    expect(wildcard("b?d", "bd")).toBe(false);
  });
  it("cannot hang the page", () => expect(wildcard("*a*a*a*a*a*a*a*b", "a".repeat(5000))).toBe(false));
});

it("is built without the highest of each category too, as where the side file is missing", () => {
  const bare = rows.map((one) => ({ ...one, highest: null }));
  const outside = ["a", "b", "c", "d"].map((name, i) => ({
    ...row(10 + i, null, `outside:${name}`, 1, 1),
    kind: "outside" as const,
    highest: null,
  }));
  expect(buildTree([...bare, ...outside], true).map((node) => node.highest)).toEqual([{}, {}]);
});
