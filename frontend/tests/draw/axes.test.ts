import { describe, expect, it } from "vitest";
import { drawTimeAxis } from "../../src/draw/axes";
import type { Palette } from "../../src/draw/palette";
import { linear } from "../../src/draw/scale";

function labels(length: number, longest?: number): string[] {
  const texts: string[] = [];
  const ignored = (): void => undefined;
  const context = { fillText: (text: string) => texts.push(text), measureText: () => ({ width: 20 }), beginPath: ignored, moveTo: ignored, lineTo: ignored, stroke: ignored };
  drawTimeAxis(context as unknown as CanvasRenderingContext2D, linear([0, length], [0, 440]), 100, 0, {} as Palette, longest);
  return texts;
}

describe("a time axis", () => {
  it("has the unit of its own length", () => expect(labels(200e6)).toEqual(["0 ms", "50 ms", "100 ms", "150 ms", "200 ms"]));
  it("has beside a longer one the unit of that", () =>
    expect(labels(200e6, 6e9)).toEqual(["0.00 s", "0.05 s", "0.10 s", "0.15 s", "0.20 s"]));
});
