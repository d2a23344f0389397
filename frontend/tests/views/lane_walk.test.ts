import { expect, it } from "vitest";
import { laneRows } from "../../src/draw/lanes";
import { spanIn, walk } from "../../src/views/timeline/lane_walk";

const span = (name: string, start_ns: number, end_ns: number) => ({ name, start_ns, end_ns, phase: null });
const lanes = laneRows({
  over: "time",
  t0: 0,
  t1: 100,
  steps: [],
  phases: [span("forward", 0, 50), span("backward", 50, 100)],
  modules: [[span("a", 0, 20), span("b", 30, 50), span("c", 60, 90)]],
  omitted: 0,
});

it("the arrow keys walk along a lane and from lane to lane, and stop at the ends", () => {
  const names: string[] = [];
  let at: ReturnType<typeof walk> = null;
  for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft", "ArrowUp", "ArrowUp"]) {
    at = walk(lanes, at, key, [0, 100]);
    names.push(spanIn(lanes, at!)!.span.name);
  }
  expect(names).toEqual(["forward", "backward", "c", "b", "a", "forward", "forward"]);
  expect(walk(lanes, at, "a", [0, 100])).toBeNull();
  expect(walk([], null, "ArrowRight", [0, 100])).toBeNull();
});

it("only what is in sight is walked to", () => {
  const at = walk(lanes, null, "ArrowRight", [55, 100]);
  expect(spanIn(lanes, at!)!.span.name).toBe("backward");
  expect(walk(lanes, at, "ArrowLeft", [55, 100])).toEqual(at);
});
