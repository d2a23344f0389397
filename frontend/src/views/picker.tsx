import { shortened, titleText, visible } from "../state/names";
import { SearchPicker } from "./search_picker";

interface Props {
  label: string;
  testid: string;
  value: string;
  options: string[];
  onPick: (value: string) => void;
  name?: (value: string) => string;
}

/** More are searched by typing. */
const MOST_IN_SELECT = 12;

/** A native select: quick, reachable by keyboard, and never longer than it may be. */
export function Picker({ label, testid, value, options, onPick, name = (v) => v }: Props) {
  const shown = (option: string): string => shortened(visible(name(option)), 32);
  if (options.length > MOST_IN_SELECT) {
    const title = titleText(value);
    return <SearchPicker {...{ label, testid, value, options, onPick, shown, title }} />;
  }
  return (
    <label class="picker">
      <span>{label}</span>
      <select
        data-testid={testid}
        title={visible(value)}
        value={String(options.indexOf(value))}
        onChange={(event) => onPick(options[Number(event.currentTarget.value)] ?? value)}
      >
        {options.map((option, i) => (
          <option key={option} value={String(i)}>
            {shown(option)}
          </option>
        ))}
      </select>
    </label>
  );
}
