import { describe, expect, it } from "vitest";
import { withoutFailures } from "../../src/views/overview/overview";
import type { Failure } from "../../src/views/failed";
import type { Note } from "../../src/api/types";

const note = (code: string, device: string): Note => ({ code, level: "info", bytes: null, device, text: `${device}: ${code}` });
const pick = { run: "a", worker: "rank0", step: 0, device: "cuda:0" };

describe("the notes beside a failed request", () => {
  const notes = [note("out_of_memory", "cuda:0"), note("out_of_memory", "cuda:1"), note("no_times", "cuda:0")];

  it("do not say the same of this device again", () =>
    expect(withoutFailures(notes, pick, [{} as Failure])).toEqual(notes.slice(1)));
  it("are all of them where no request failed", () => expect(withoutFailures(notes, pick, [])).toEqual(notes));
});
