import { describe, expect, it } from "vitest";
import type { ModuleRow } from "../../src/api/types";
import { type Icicle, icicleOf, layersAsOne, wayTo } from "../../src/state/module_icicle";
import { buildTree } from "../../src/state/module_tree";

interface Given {
  own: number;
  kind?: ModuleRow["kind"];
  className?: string;
}

/** Rows from keys with their own bytes; a module's parent is the longest other key that it begins with. */
function rows(given: Record<string, Given>): ModuleRow[] {
  const keys = Object.keys(given);
  const parentOf = (key: string): number | null => {
    const above = keys.filter((k) => k !== key && given[key]!.kind === undefined && (k === "" || key.startsWith(`${k}.`)));
    return above.length > 0 ? keys.indexOf(above.sort((a, b) => b.length - a.length)[0]!) : null;
  };
  const inclusive = (key: string): number =>
    given[key]!.own + keys.filter((k) => parentOf(k) === keys.indexOf(key)).reduce((sum, k) => sum + inclusive(k), 0);
  return keys.map((key, id) => {
    const { own, kind = "module", className = null } = given[key]!;
    const all = inclusive(key);
    return {
      ...{ id, parent: parentOf(key), key, name: key, depth: 0, class_name: className, kind },
      ...{ own: { activation: own }, inclusive: { activation: all }, own_bytes: own, inclusive_bytes: all },
      ...{ highest: { activation: all }, highest_ns: 0, highest_in_forward: null, highest_in_backward: null, peak_inside_bytes: null, calls: key === "blocks" ? 0 : 1 },
      ...{ allocations: 1, allocated_bytes: 0, forward_ns: 0, backward_ns: 0 },
    };
  });
}

const MODEL: Record<string, Given> = {
  "": { own: 5, className: "Net" },
  embed: { own: 10 },
  blocks: { own: 0 },
  "blocks.0": { own: 1 },
  "blocks.0.attn": { own: 20 },
  "blocks.0.mlp": { own: 30 },
  "blocks.1": { own: 2 },
  "blocks.1.attn": { own: 21 },
  "blocks.1.mlp": { own: 31 },
  "outside:aten::add": { own: 7, kind: "outside" },
};

/** Each bar as the way to it and its width. */
function bars(icicle: Icicle): Record<string, number> {
  const name = (place: number): string =>
    wayTo(icicle.parent, place)
      .slice(1)
      .map((at) => icicle.name[at])
      .join(" / ");
  return Object.fromEntries(icicle.id.map((place) => [name(place), icicle.bytes[place]!]));
}

describe("the icicle of modules", () => {
  it("hangs modules under those that hold them, as wide as their bytes, and all under the whole", () => {
    const found = bars(icicleOf(buildTree(rows(MODEL), false)));
    expect(found).toMatchObject({
      "": 127,
      "(root)": 120,
      "(root) / embed": 10,
      "(root) / blocks": 105,
      "(root) / blocks / 1": 54,
      "(root) / blocks / 1 / mlp": 31,
      "outside · aten::add": 7,
    });
  });

  it("shows repeated layers as one, with what each holds summed over all", () => {
    const icicle = icicleOf(layersAsOne(buildTree(rows(MODEL), true)));
    expect(bars(icicle)).toEqual({
      "": 127,
      "(root)": 120,
      "(root) / embed": 10,
      "(root) / blocks ×2": 105,
      "(root) / blocks ×2 / attn ×2": 41,
      "(root) / blocks ×2 / mlp ×2": 61,
      "outside · aten::add": 7,
    });
    expect(icicle.key).toContain("blocks.*.mlp");
  });

  it("folds layers within layers", () => {
    const given: Record<string, Given> = { "": { own: 0 } };
    for (const stage of [0, 1, 2])
      for (const layer of [0, 1, 2]) given[`stages.${stage}.${layer}.up`] = { own: 1 };
    for (const stage of [0, 1, 2]) given[`stages.${stage}`] = { own: 0 };
    for (const stage of [0, 1, 2]) for (const layer of [0, 1, 2]) given[`stages.${stage}.${layer}`] = { own: 10 };
    given["stages"] = { own: 0 };
    const sorted = Object.fromEntries(Object.entries(given).sort(([a], [b]) => a.length - b.length));
    const found = bars(icicleOf(layersAsOne(buildTree(rows(sorted), true))));
    expect(found[""]).toBe(99);
    expect(Object.entries(found).filter(([way]) => way.endsWith("up ×9"))).toEqual([[expect.any(String), 9]]);
    expect(Object.keys(found).length).toBeLessThan(8);
  });

  it("keeps layers of different classes apart", () => {
    const given = {
      "": { own: 0 },
      layers: { own: 0 },
      ...Object.fromEntries([0, 1, 2, 3].map((n) => [`layers.${n}`, { own: 1, className: n % 2 ? "Odd" : "Even" }])),
      ...Object.fromEntries([0, 1, 2, 3].map((n) => [`layers.${n}.a`, { own: 10 ** n }])),
    };
    const icicle = icicleOf(layersAsOne(buildTree(rows(given), true)));
    expect(icicle.bytes.filter((bytes) => bytes === 101 || bytes === 1010)).toHaveLength(2);
    expect(new Set(icicle.key).size).toBe(icicle.key.length);
  });

  it("sums to the whole at every bar: its own and what is inside", () => {
    for (const fold of [true, false]) {
      const tree = buildTree(rows(MODEL), fold);
      const icicle = icicleOf(fold ? layersAsOne(tree) : tree);
      icicle.bytes.forEach((bytes, place) => {
        const inside = icicle.id.filter((at) => icicle.parent[at] === place);
        expect(inside.reduce((sum, at) => sum + icicle.bytes[at]!, 0)).toBeLessThanOrEqual(bytes);
      });
      expect(icicle.bytes[0]).toBe(127);
    }
  });
});
