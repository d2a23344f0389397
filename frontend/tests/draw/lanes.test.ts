import { describe, expect, it } from "vitest";
import { type Lane, labelsOf } from "../../src/draw/lanes";
import { linear } from "../../src/draw/scale";

/** Every letter 10 pixels wide; a label has 11 pixels less than its span. */
const PEN = { measureText: (text: string) => ({ width: 10 * text.length }) as TextMetrics };

function texts(...spans: [name: string, from: number, to: number, phase?: string][]): string[] {
  const lane: Lane = {
    kind: "module",
    label: "",
    spans: spans.map(([name, start_ns, end_ns, phase = "forward"]) => ({ name, start_ns, end_ns, phase })),
    top: 0,
    height: 17,
  };
  return labelsOf(PEN, lane, linear([0, 1000], [0, 1000])).map(([text]) => text);
}

describe("the labels of module calls", () => {
  it("are alike for layers of one kind: where one is cut, all are", () => {
    expect(texts(["blocks.0", 0, 90], ["blocks.1", 90, 200])).toEqual(["0", "1"]);
    expect(texts(["blocks.0", 0, 100], ["blocks.1", 100, 200])).toEqual(["blocks.0", "blocks.1"]);
  });
  it("leave other kinds and phases whole", () => {
    expect(texts(["blocks.0", 0, 90], ["h.1", 90, 200])).toEqual(["0", "h.1"]);
    expect(texts(["blocks.0", 0, 90], ["blocks.0", 90, 200, "backward"])).toEqual(["0", "blocks.0"]);
  });
  it("are the beginning of the last part where no more fits", () => {
    expect(texts(["blocks.0.attn", 0, 45])).toEqual(["at…"]);
  });
  it("are left out where there is no room", () => expect(texts(["blocks.0", 0, 20])).toEqual([]));
});
