import type { AccountJson, AccountMoment } from "../../api/types";
import { exactBytes } from "../../state/bytes";
import { titleText } from "../../state/names";

/** How the window's bytes agree with the allocator's own; the numbers of each moment on hover. */
export function AccountLine({ account }: { account: AccountJson }) {
  return (
    <p class={`account ${account.level}`} data-testid="account" title={account.moments.map(momentText).join("\n")}>
      <span class="kind">Account of the window:</span> {titleText(account.text)}
    </p>
  );
}

function momentText({ moment, counted_bytes, allocator_bytes, at_least }: AccountMoment): string {
  const counted = `${moment}: ${exactBytes(counted_bytes)} recorded`;
  if (allocator_bytes === null) return counted;
  return `${counted}, ${at_least ? "at least " : ""}${exactBytes(allocator_bytes)} by the counter`;
}
