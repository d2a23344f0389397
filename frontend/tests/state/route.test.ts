import { describe, expect, it } from "vitest";
import { formatRoute, parseRoute, patched, routeFrom } from "../../src/state/route";

describe("the route in the URL", () => {
  it("survives the way there and back, whatever the names hold", () => {
    const route = routeFrom({ view: "timeline", run: "a&b=c#d\n<é>", step: "42", by: "module" });
    expect(parseRoute(`#${formatRoute(route)}`)).toEqual(route);
  });
  it("reads as people write it", () =>
    expect(parseRoute("view=modules&find=blocks.*.attn")).toEqual({ view: "modules", find: "blocks.*.attn" }));
  it("leaves out what is not ours, empty or endless", () => {
    expect(parseRoute(`view=nonsense&evil=1&run=&worker=${"x".repeat(5000)}&__proto__=1`)).toEqual({
      view: "overview",
    });
  });
  it("bears broken escapes", () => expect(parseRoute("run=%E0%A4%A")).toEqual({ view: "overview", run: "%E0%A4%A" }));
  it("takes TensorBoard's prefix", () =>
    expect(formatRoute({ view: "compare", step: "3" }, "p.x.")).toBe("p.x.view=compare&p.x.step=3"));
});

describe("a new pick", () => {
  const route = routeFrom({ view: "timeline", run: "a", step: "1", t0: "5", t1: "9", t: "7", by: "phase" });
  it("keeps the view and drops the zoom and the cursor", () => {
    expect(patched(route, { step: "2" })).toEqual({ view: "timeline", run: "a", step: "2", by: "phase" });
  });
  it("of the same step keeps the zoom", () => expect(patched(route, { step: "1" })).toEqual(route));
  it("can set the cursor on the new step", () => expect(patched(route, { step: "2", t: "3" }).t).toBe("3"));
  it("another time is another event, unless both are told", () => {
    const exact = { ...route, event: "12" };
    expect(patched(exact, { t: "3" }).event).toBeUndefined();
    expect(patched(exact, { t: "3", event: "4" }).event).toBe("4");
    expect(patched(exact, { by: "module" }).event).toBe("12");
  });
  it("another tree of stacks has other nodes", () => {
    const zoomed = routeFrom({ view: "stacks", t: "7", node: "12" });
    expect(patched(zoomed, { frames: "all" }).node).toBeUndefined();
    expect(patched(zoomed, { t: "7" }).node).toBe("12");
    expect(patched(zoomed, { t: "8", event: "9" }).node).toBeUndefined();
    expect(patched(zoomed, { search: "mlp" }).node).toBe("12");
  });
  it("undefined takes a key away", () => expect(patched(route, { by: undefined }).by).toBeUndefined());
});
