import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import { cellAt, cellPixels, columnLeft, layHeatMap, ramp } from "../../src/draw/heat_map";

describe("the cells of a heat map", () => {
  const layout = layHeatMap(4, 10, 348, 48, 8, 460);
  it("fill the width, in rows as high as there is room for", () => {
    expect([layout.width, layout.rowHeight, layout.height]).toEqual([300, 26, 104]);
    expect(layHeatMap(1024, 10, 348, 48, 8, 460).rowHeight).toBe(4);
    expect(layHeatMap(4, 1, 1000, 48, 8, 460).width).toBe(132); // one step is no band across the page
  });
  it("are found again under the pointer", () => {
    for (const [row, column] of [
      [0, 0],
      [3, 9],
      [2, 4],
    ] as const) {
      const x = (columnLeft(layout, column) + columnLeft(layout, column + 1)) / 2;
      expect(cellAt(layout, x, 8 + (row + 0.5) * 26)).toEqual({ row, column });
    }
    expect(cellAt(layout, 47, 20)).toBeNull();
    expect(cellAt(layout, 348, 20)).toBeNull();
    expect(cellAt(layout, 60, 8 + 104)).toBeNull();
  });
});

describe("their colors", () => {
  it("run from the first stop to the last, and what is missing stays clear", () => {
    const pixels = cellPixels([[0, 10, null]], 3, [0, 10], ramp(["#102030", "#405060"]));
    expect([...pixels]).toEqual([0x10, 0x20, 0x30, 255, 0x40, 0x50, 0x60, 255, 0, 0, 0, 0]);
  });
  it("do not leave the ramp where values do", () => {
    const colors = ramp(["#000000", "#ffffff"]);
    expect([...cellPixels([[-5, 99]], 2, [0, 10], colors)]).toEqual([0, 0, 0, 255, 255, 255, 255, 255]);
  });
});

/** How people see a color that lack one kind of cone (Machado, Oliveira and Fernandes 2009), on linear sRGB. */
const SIGHTS: Record<string, number[][]> = {
  usual: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritanopia: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

function lightness(color: string, sight: number[][]): number {
  const linear = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255).map((c) => ((c + 0.055) / 1.055) ** 2.4);
  const seen = sight.map((row) => Math.min(1, Math.max(0, row.reduce((sum, part, i) => sum + part * linear[i]!, 0))));
  return 116 * Math.cbrt(0.2126 * seen[0]! + 0.7152 * seen[1]! + 0.0722 * seen[2]!) - 16;
}

describe("the ramp of both themes", () => {
  const theme = readFileSync(new URL("../../src/views/style/ranks.css", import.meta.url), "utf-8");
  const stops = [...theme.matchAll(/--ramp-\d: (#[0-9a-f]{6});/g)].map((found) => found[1]!);
  it.each(Object.keys(SIGHTS))("gets darker in the light one, lighter in the dark one, step by step, with %s", (sight) => {
    expect(stops).toHaveLength(10);
    const seen = stops.map((stop) => lightness(stop, SIGHTS[sight]!));
    for (let i = 0; i < 4; i++) {
      expect(seen[i]! - seen[i + 1]!).toBeGreaterThan(8);
      expect(seen[i + 6]! - seen[i + 5]!).toBeGreaterThan(8);
    }
  });
});
