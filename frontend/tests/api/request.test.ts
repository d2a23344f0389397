import { afterEach, describe, expect, it, vi } from "vitest";
import { address, request, RequestFailed, without } from "../../src/api/request";

afterEach(() => vi.unstubAllGlobals());
const answering = (status: number, body: string) => vi.stubGlobal("fetch", async () => new Response(body, { status }));
const failure = async () => (await request("step?run=a").catch((e: unknown) => e)) as RequestFailed;

it("addresses are relative, escaped, and leave out what is not set", () => {
  expect(address("step", { run: "a&b/ü", step: 3, t0: undefined })).toBe("step?run=a%26b%2F%C3%BC&step=3");
  expect(address("runs")).toBe("runs");
});

it("addresses that differ in some keys alone are one without these", () => {
  expect(without(["step", "t"], "step?step=3&run=a&t0=1&t=5")).toBe("step&run=a&t0=1");
  expect(without(["step"], "runs")).toBe("runs");
});

describe("a request", () => {
  it("hands out the answer", async () => {
    answering(200, '{"runs": []}');
    await expect(request("runs")).resolves.toEqual({ runs: [] });
  });
  it("hands out what the server says went wrong", async () => {
    answering(404, '{"error": {"what": "No step 9.", "where": "run a", "fix": "Pick another."}}');
    expect((await failure()).failure).toEqual({ what: "No step 9.", where: "run a", fix: "Pick another." });
  });
  it("says so when the server explains nothing", async () => {
    answering(500, "<html>");
    expect((await failure()).failure).toMatchObject({
      what: "The server answered with status 500 and no explanation.",
      where: "step",
    });
  });
  it("says so when the answer is not JSON", async () => {
    answering(200, "<html>sign in</html>");
    expect((await failure()).failure.what).toBe("The answer is not JSON.");
  });
  it("says so when nobody answers", async () => {
    vi.stubGlobal("fetch", async () => Promise.reject(new TypeError("failed")));
    expect((await failure()).failure.what).toBe("TensorBoard did not answer.");
  });
});
