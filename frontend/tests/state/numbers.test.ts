import { expect, it } from "vitest";
import { counted } from "../../src/state/numbers";

it("a noun agrees with its number", () => {
  expect(counted(1, "row")).toBe("1 row");
  expect(counted(0, "row")).toBe("0 rows");
  expect(counted(2000, "row matches", "rows match")).toBe("2,000 rows match");
});
