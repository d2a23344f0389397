import { describe, expect, it } from "vitest";
import { unpackedRuns } from "../../src/api/runs";

const columns = (at: number[], peaks: number[]) => ({
  at,
  peak_bytes: peaks,
  peak_time_ns: at,
  peak_reserved_bytes: at.map(() => null),
  step_start_ns: at,
  step_end_ns: at,
  capacity_bytes: at.map(() => 100),
});

describe("the runs' steps", () => {
  const steps = { step: [5, 6, 6], window: [0, 0, 1], devices: { cpu: columns([0, 1, 2], [7, 8, 9]), ["__proto__"]: columns([2], [4]) } };
  const [run] = unpackedRuns({ runs: [{ end_ns: 1, run: "a", workers: [{ dump_of: "", model: "", worker: "w", devices: ["cpu"], steps, monitored: {} }] }], problems: [], logdir: "" }).runs;
  const entries = run!.workers[0]!.steps;

  it("come in rows, each with the devices that it has", () => {
    expect(entries.map(({ step, window }) => [step, window])).toEqual([[5, 0], [6, 0], [6, 1]]);
    expect(entries.map(({ devices }) => Object.keys(devices))).toEqual([["cpu"], ["cpu"], ["cpu", "__proto__"]]);
    expect(entries[2]!.devices["__proto__"]).toEqual({
      peak_bytes: 4,
      peak_time_ns: 2,
      peak_reserved_bytes: null,
      step_start_ns: 2,
      step_end_ns: 2,
      capacity_bytes: 100,
    });
  });
});
