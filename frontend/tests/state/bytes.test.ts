import { readFileSync } from "node:fs";
import { describe, expect, it } from "vitest";
import { asPartOf, deltaInUnit, deltaWithUnit, exactBytes, inUnit, percent, unitFor, withUnit } from "../../src/state/bytes";

/** The same table that the Python side is held to: tests/analysis/test_units.py. */
const CASES: [number, string][] = JSON.parse(readFileSync(new URL("../../../tests/analysis/sizes.json", import.meta.url), "utf-8"));
const MiB = 2 ** 20;
const GiB = 2 ** 30;

describe("the unit of a table", () => {
  it("is the largest that still shows the parts", () => {
    expect(unitFor(18.53 * GiB).name).toBe("GiB");
    expect(unitFor(3 * MiB, 5 * GiB).name).toBe("GiB");
    expect(unitFor(1.26 * GiB).name).toBe("GiB");
    expect(unitFor(113.4 * MiB).name).toBe("MiB");
  });
  it("is bytes for a few bytes and for nothing", () => {
    expect(unitFor(0).name).toBe("B");
    expect(unitFor().name).toBe("B");
    expect(unitFor(512).name).toBe("B");
  });
  it("is the whole's for its parts, unless they are less than a tenth of it", () => {
    expect(asPartOf(94 * MiB, 1.91 * MiB)).toBe("1.91 MiB");
    expect(asPartOf(94 * MiB, MiB / 2)).toBe("0.50 MiB");
    expect(asPartOf(94 * MiB, 102 * 1024)).toBe("102.0 KiB");
  });
  it("looks at sizes, not signs", () => expect(unitFor(-8 * MiB).name).toBe("MiB"));
});

describe("bytes", () => {
  const mib = unitFor(100 * MiB);
  it("have three or four digits, as everywhere", () => {
    for (const [bytes, text] of CASES) expect(withUnit(bytes)).toBe(text);
    expect(inUnit(1.5 * MiB, mib)).toBe("1.50");
    expect(inUnit(1290.875 * MiB, mib)).toBe("1,291");
  });
  it("never read as zero when something is there", () => {
    expect(inUnit(512, mib)).toBe("< 0.01");
    expect(inUnit(0, mib)).toBe("0.00");
  });
  it("print whole where the unit is a byte", () => expect(withUnit(512)).toBe("512 B"));
  it("are exact on hover", () => expect(exactBytes(118908518)).toBe("118,908,518 bytes"));
});

describe("a change", () => {
  const gib = unitFor(18 * GiB);
  it("is a dash where nothing changed", () => expect(deltaInUnit(0, gib)).toBe("–"));
  it("carries its sign", () => {
    expect(deltaInUnit(0.31 * GiB, gib)).toBe("+0.31");
    expect(deltaInUnit(-0.5 * GiB, gib)).toBe("−0.50");
    expect(deltaInUnit(1024, gib)).toBe("< +0.01");
  });
  it("takes its own unit where the table's would hide it", () => {
    expect(deltaWithUnit(5 * 1024, gib)).toBe("+5.00 KiB");
    expect(deltaWithUnit(-2 * GiB, gib)).toBe("−2.00 GiB");
  });
});

describe("a share", () => {
  it("has one decimal", () => expect(percent(1, 4)).toBe("25.0 %"));
  it("of nothing is a dash", () => expect(percent(1, 0)).toBe("–"));
  it("never reads as zero when something is there", () => expect(percent(1, 1e6)).toBe("< 0.1 %"));
});
