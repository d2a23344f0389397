import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import type { CompareRow, Part } from "../../src/api/types";
import { foldChanges, mainCategory, openedChange } from "../../src/state/change_folding";
import { foldParts, inRows, layerOf, opened } from "../../src/state/folding";

const part = (key: string, bytes: number): Part => ({ key, bytes, count: 1, categories: { activation: bytes } });

interface Case {
  why: string;
  keys: string[];
  rows: string[];
}

/** The same table that the Python side is held to: tests/analysis/test_folded_layers.py. */
const cases: Case[] = JSON.parse(
  readFileSync(new URL("../../../tests/analysis/folded_layers.json", import.meta.url), "utf-8"),
);

describe("folding", () =>
  it.each(cases)("$why", ({ keys, rows }) => {
    const named = inRows(keys.map((key) => ({ key }))).flatMap(([row, things]) => things.map(({ key }) => [key, row]));
    expect(keys.map((key) => Object.fromEntries(named)[key])).toEqual(rows);
  }));

describe("parts", () => {
  it("of repeated layers become one row that keeps the sum", () => {
    const rows = foldParts([part("head", 5), part("blocks.0.mlp", 4), part("blocks.1.mlp", 3)]);
    expect(rows.map((r) => [r.key, r.bytes, r.members.length])).toEqual([
      ["blocks.*.mlp", 7, 2],
      ["head", 5, 1],
    ]);
    expect(rows[0]!.categories).toEqual({ activation: 7 });
  });
  it("of a short plain sequence stay apart", () => {
    expect(foldParts([part("net.0", 4), part("net.2", 3)]).map((r) => r.key)).toEqual(["net.0", "net.2"]);
  });
  it("of a row open into its layers, and these into theirs", () => {
    const experts = [0, 1].flatMap((layer) => [0, 1, 2].map((expert) => part(`h.${layer}.experts.${expert}.up`, 1 + layer)));
    const [row] = foldParts(experts);
    expect([row!.key, row!.members.length]).toEqual(["h.*.experts.*.up", 6]);
    const layers = opened(row!);
    expect(layers.map((layer) => [layer.key, layer.bytes])).toEqual([
      ["h.1.experts.*.up", 6],
      ["h.0.experts.*.up", 3],
    ]);
    expect(opened(layers[0]!).map((one) => [one.key, one.members.length])).toEqual([
      ["h.1.experts.0.up", 1],
      ["h.1.experts.1.up", 1],
      ["h.1.experts.2.up", 1],
    ]);
  });
  it("of an opened row go by what tells them apart", () => {
    expect(layerOf("model.h.3.experts.*.up", "model.h.*.experts.*.up")).toBe("h.3");
    expect(layerOf("model.h.3.experts.17.up", "model.h.3.experts.*.up")).toBe("experts.17");
    expect(layerOf("5.weight", "*.weight")).toBe("5");
  });
  it("of 20,000 experts fold in well under a second", () => {
    const parts = Array.from({ length: 20_000 }, (_, i) => part(`layers.${i % 50}.experts.${Math.floor(i / 50)}.up`, 1));
    const begin = performance.now();
    expect(foldParts(parts).map((row) => [row.key, row.members.length])).toEqual([["layers.*.experts.*.up", 20_000]]);
    expect(performance.now() - begin).toBeLessThan(3000); // some 60 ms where nothing else runs
  });
  it("of a single layer stay what they are", () =>
    expect(foldParts([part("blocks.0.mlp", 4)])[0]!.key).toBe("blocks.0.mlp"));
});

describe("changes", () => {
  const change = (key: string, base: number, other: number, status: CompareRow["status"]): CompareRow => ({
    key,
    label: key,
    status,
    base_bytes: base,
    other_bytes: other,
    delta_bytes: other - base,
    base_count: 1,
    other_count: 1,
    category: "activation",
    category_delta_bytes: other - base,
  });
  it("of repeated layers add up", () => {
    const [row] = foldChanges([change("h.0.mlp", 10, 12, "grown"), change("h.1.mlp", 10, 13, "grown")]);
    expect(row).toMatchObject({ key: "h.*.mlp", status: "grown", base_bytes: 20, other_bytes: 25, delta_bytes: 5 });
  });
  it("that cancel are the same, and come last", () => {
    const rows = foldChanges([
      change("h.0.mlp", 10, 12, "grown"),
      change("h.1.mlp", 12, 10, "shrunk"),
      change("head", 0, 1, "added"),
    ]);
    expect(rows.map((r) => [r.key, r.status])).toEqual([
      ["head", "added"],
      ["h.*.mlp", "same"],
    ]);
  });
  it("go by the category that moved most in the group's direction", () => {
    const shrunk = { ...change("h.3.mlp", 15, 8, "shrunk"), category: "autograd_detail" };
    const grown = ["h.0.mlp", "h.1.mlp"].map((key) => ({ ...change(key, 2, 8, "grown"), category: "optimizer_state" }));
    expect(foldChanges([shrunk, ...grown])[0]).toMatchObject({ delta_bytes: 5, category: "optimizer_state" });
  });
  it("have a main category only where that makes up most of them", () => {
    const head = change("head", 0, 12, "added");
    const main = (category_delta_bytes: number) => mainCategory({ ...head, category: "temporary", category_delta_bytes });
    expect([4, 6, 7, 12, 13].map(main)).toEqual([null, null, "temporary", "temporary", "temporary"]);
    expect(mainCategory({ ...head, delta_bytes: 0, category_delta_bytes: 0 })).toBeNull();
  });
  it("of an opened row are its layers', largest change first", () => {
    const rows = [1, 2].flatMap((layer) => [0, 1].map((expert) => change(`h.${layer}.e.${expert}.up`, 1, 1 + layer, "grown")));
    const layers = openedChange(foldChanges(rows)[0]!);
    expect(layers.map((row) => [row.key, row.delta_bytes, row.members.length])).toEqual([
      ["h.2.e.*.up", 4, 2],
      ["h.1.e.*.up", 2, 2],
    ]);
    expect(openedChange(layers[0]!).map((row) => [row.key, row.members.length])).toEqual([
      ["h.2.e.0.up", 0],
      ["h.2.e.1.up", 0],
    ]);
  });
  it("are added only where every layer is", () => {
    const rows = foldChanges([change("h.0.mlp", 0, 2, "added"), change("h.1.mlp", 1, 2, "grown")]);
    expect(rows[0]!.status).toBe("grown");
  });
});
