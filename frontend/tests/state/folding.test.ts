import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import type { CompareRow, Part } from "../../src/api/types";
import { foldChanges } from "../../src/state/change_folding";
import { foldedKeys, foldParts } from "../../src/state/folding";

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
  it.each(cases)("$why", ({ keys, rows }) => expect(foldedKeys(keys)).toEqual(rows)));

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
  it("of a single layer stay what they are", () =>
    expect(foldParts([part("blocks.0.mlp", 4)])[0]!.key).toBe("blocks.0.mlp"));
});

describe("changes", () => {
  const change = (key: string, base: number, other: number, status: CompareRow["status"]): CompareRow => ({
    key,
    status,
    base_bytes: base,
    other_bytes: other,
    delta_bytes: other - base,
    base_count: 1,
    other_count: 1,
    category: "activation",
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
  it("are added only where every layer is", () => {
    const rows = foldChanges([change("h.0.mlp", 0, 2, "added"), change("h.1.mlp", 1, 2, "grown")]);
    expect(rows[0]!.status).toBe("grown");
  });
});
