import { expect, it, vi } from "vitest";
import { diagonals } from "../../src/draw/palette";

it("makes a hatched tile once for its colors, not once a frame", () => {
  const ink = { fillRect: vi.fn(), moveTo: vi.fn(), lineTo: vi.fn(), stroke: vi.fn() };
  const createElement = vi.fn(() => ({ getContext: () => ink }));
  vi.stubGlobal("document", { createElement });
  const context = { createPattern: vi.fn((tile: unknown) => ({ tile })) } as unknown as CanvasRenderingContext2D;
  const dark = diagonals(context, 8, "#888", 2, [["#000", 1]]);
  expect(diagonals(context, 8, "#888", 2, [["#000", 1]])).toBe(dark);
  expect(createElement).toHaveBeenCalledTimes(1);
  const light = diagonals(context, 8, "#888", 2, [["#fff", 1]]);
  expect(light).not.toBe(dark);
  expect(createElement).toHaveBeenCalledTimes(2);
  vi.unstubAllGlobals();
});
