import { describe, expect, it } from "vitest";
import type { Pieces } from "../../src/api/types";
import { boxes, lastLine, layTape, pieceAt, pieceStarts, segmentAt, segmentsBetween } from "../../src/draw/tape";

describe("a tape of segments", () => {
  const tape = layTape([300, 500, 2500, 400], null, 10, 100);

  it("places segments side by side, as wide as they have bytes", () => {
    expect([...tape.extent]).toEqual([30, 50, 250, 40]);
    expect([...tape.left]).toEqual([0, 32, 0, 52]);
    expect([...tape.line]).toEqual([0, 0, 1, 3]);
  });

  it("breaks one that is longer than a line, and goes on behind its end", () => {
    expect(lastLine(tape, 2)).toBe(3);
    expect(boxes(tape, 2, 0, 2500)).toEqual([
      [1, 0, 100],
      [2, 0, 100],
      [3, 0, 50],
    ]);
    expect(tape.lines).toBe(4);
  });

  it("finds what lies under a place", () => {
    expect(segmentAt(tape, 0, 35)).toEqual({ segment: 1, offset: 30 });
    expect(segmentAt(tape, 2, 10)).toEqual({ segment: 2, offset: 1100 });
    expect(segmentAt(tape, 0, 95)).toBeNull();
  });

  it("tells which segments reach into lines", () => {
    expect(segmentsBetween(tape, 0, 0)).toEqual([0, 1]);
    expect(segmentsBetween(tape, 2, 2)).toEqual([2, 2]);
    expect(segmentsBetween(tape, 3, 9)).toEqual([2, 3]);
    expect(segmentsBetween(tape, 7, 9)).toBeNull();
  });

  it("gives each home a heading and a line of its own", () => {
    const homes = layTape([300, 200, 100], [1, 1, 0], 10, 100);
    expect(homes.headings).toEqual([
      { line: 0, home: 1 },
      { line: 2, home: 0 },
    ]);
    expect([...homes.line]).toEqual([1, 1, 3]);
  });

  it("never draws a segment away", () => {
    expect([...layTape([1], null, 1e9, 100).extent]).toEqual([2]);
    expect(layTape([], null, 10, 100).lines).toBe(0);
  });
});

it("finds the piece that holds a byte", () => {
  const columns = { bytes: [], requested: [], state: [], key: [], row: [], count: [], finest: 1 };
  const pieces: Pieces = { ...columns, segment: [0, 0, 2], offset: [0, 50, 0] };
  const starts = pieceStarts(pieces, 3);
  expect([...starts]).toEqual([0, 2, 2, 3]);
  expect([pieceAt(pieces, starts, 0, 49), pieceAt(pieces, starts, 0, 50), pieceAt(pieces, starts, 2, 9)]).toEqual([
    0, 1, 2,
  ]);
  expect(pieceAt(pieces, starts, 1, 0)).toBe(-1);
});
