import { deflateSync } from "node:zlib";
import { expect, it } from "vitest";
import { unpack, unpackSteps } from "../../src/report/recording";

function packed(planes: number[], count: number) {
  return { count, width: planes.length / count, data: deflateSync(Uint8Array.from(planes)).toString("base64") };
}

it("puts bytes of a number together, the lowest first, the last with the sign", async () => {
  expect(Array.from(await unpack(packed([1, 255, 2, 255], 2)))).toEqual([513, -1]);
});

it("sums differences up", async () => {
  expect(Array.from(await unpackSteps(packed([5, 1, 254], 3)))).toEqual([5, 6, 4]);
});

it("takes an empty column", async () => {
  expect(Array.from(await unpack(packed([], 0)))).toEqual([]);
});
