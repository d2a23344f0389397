import { expect, it } from "vitest";
import { ourKeys, withOurKeys } from "../../src/host/address";

const route = { view: "timeline", run: "a b", step: "3" } as const;

it("our keys go beside TensorBoard's, which stay as they are", () => {
  expect(withOurKeys("#tb_memplugin&tagFilter=x%20y&p.tb_memplugin.view=overview", route)).toBe(
    "#tb_memplugin&tagFilter=x%20y&p.tb_memplugin.view=timeline&p.tb_memplugin.run=a%20b&p.tb_memplugin.step=3",
  );
});

it("another tab's address is not ours to write", () =>
  expect(withOurKeys("#scalars&_smoothing=0.5", route)).toBeNull());

it("an address without a tab gets ours", () =>
  expect(withOurKeys("", { view: "overview" })).toBe("#tb_memplugin&p.tb_memplugin.view=overview"));

it("our keys are read back", () => {
  expect(ourKeys("#tb_memplugin&x=1&p.tb_memplugin.view=timeline&p.tb_memplugin.run=a%20b&p.other.run=z")).toEqual({
    view: "timeline",
    run: "a b",
  });
  expect(ourKeys("#tb_memplugin&p.other.run=z")).toBeNull();
});
