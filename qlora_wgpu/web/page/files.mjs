/** Rows of a file that was dropped: JSON Lines, JSON, CSV; a text file is one document. */

import { hintOfList } from './conversations.mjs';
import { Told } from './device.mjs';
import { JsonReader, parseJson } from './json.mjs';
import { isBlank } from './strip.mjs';
import { counted } from './words.mjs';

const KINDS = ['jsonl', 'ndjson', 'json', 'csv', 'tsv', 'txt', 'md'];
const PACKED = ['gz', 'zip', 'bz2', 'xz', 'zst', '7z', 'rar', 'tar', 'tgz'];
const MOST_MIB = 256; // of a file: browsers end a string at 512 MiB, and examples take more than their text

const kindOf = (name) => name.split('.').pop().toLowerCase();

/**
 * The text of a file that was dropped.
 *
 * @param {string} name
 * @param {Blob} file
 * @throws {Told} If it is no text, or too long.
 */
export async function textOf(name, file) {
  checkKind(name);
  const mib = Math.ceil(file.size / 2 ** 20);
  if (mib > MOST_MIB) throw new Told(`${name} has ${mib.toLocaleString('en')} MiB, and a page reads ${MOST_MIB} at most: take a part of it.`);
  let content;
  try {
    content = await file.arrayBuffer();
  } catch (error) {
    throw new Told(`${name} cannot be read (${error.message}): choose it again.`);
  }
  if (isPacked(content)) throw new Told(`${name} is compressed: unpack it first.`);
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(content);
  } catch {
    throw new Told(`${name} is no text in UTF-8: save it in that encoding.`);
  }
}

/** Whether a file begins as those of gzip or zip do. */
function isPacked(content) {
  const [first, second] = new Uint8Array(content.slice(0, 2));
  return (first === 0x1f && second === 0x8b) || (first === 0x50 && second === 0x4b && new Uint8Array(content.slice(2, 3))[0] < 0x20);
}

function checkKind(name) {
  const kind = kindOf(name);
  if (PACKED.includes(kind)) throw new Told(`${name} is compressed: unpack it first.`);
  if (kind === 'parquet') throw new Told(`${name}: Parquet is not read in a browser: save it as .jsonl or .csv.`);
  if (!KINDS.includes(kind)) throw new Told(`${name} is of no known kind: use .jsonl, .json, .csv or .txt.`);
}

/**
 * @param {string} name The file's name, whose ending tells its kind.
 * @param {string} text Its content.
 * @returns {{where: string, row: object, document?: boolean}[]}
 * @throws {Told} If it is none of them, or damaged.
 */
export function rowsOf(name, text) {
  checkKind(name);
  const kind = kindOf(name);
  const content = text.replace(/^\ufeff/, '');
  if (kind === 'jsonl' || kind === 'ndjson') return jsonLines(name, content);
  if (kind === 'json') return jsonRows(name, content);
  if (kind === 'csv' || kind === 'tsv') return csvRows(name, content);
  return [{ where: name, row: { text: content }, document: true }];
}

const isList = (content) => /^[ \t\n\r]*\[/.test(content);

/** Rows of a .json file: one list of them, or one after another. An object by itself has its rows somewhere in it, if any. */
function jsonRows(name, content) {
  const values = [];
  within(name, () => {
    const reader = new JsonReader(content);
    if (isList(content)) {
      reader.items(']', () => values.push(reader.value()));
      if (reader.peek()) throw reader.wrong('Extra data');
    } else {
      while (reader.peek()) values.push(reader.value());
    }
  });
  if (!isList(content) && values.length < 2) throw new Told(`${name} must hold a list of rows, or one object per line${hintOfList(values[0])}.`);
  return checked(values.map((row, index) => ({ where: `${name} row ${index + 1}`, row })), name);
}

function jsonLines(name, content) {
  const rows = [];
  if (isList(content)) throw new Told(`${name} holds one list: a file that is one must end in .json.`);
  content.split('\n').forEach((line, index) => {
    const where = `${name} line ${index + 1}`;
    if (!isBlank(line)) rows.push({ where, row: within(where, () => parseJson(line)) });
  });
  return checked(rows, name);
}

/** What is read at a place, which is named where something is wrong. */
function within(where, read) {
  try {
    return read();
  } catch (error) {
    throw error instanceof Told ? new Told(`${where}: ${error.message}.`) : error;
  }
}

function checked(rows, name) {
  if (!rows.length) throw new Told(`${name} has no rows.`);
  for (const { where, row } of rows) {
    if (!row || typeof row !== 'object' || Array.isArray(row)) throw new Told(`${where}: a row must be a JSON object, such as {"text": …}.`);
  }
  return rows;
}

/** Comma-separated values, by semicolons or tabs where the first line has no comma. */
function csvRows(name, content) {
  const first = content.split(/[\r\n]/, 1)[0];
  const delimiter = [',', ';', '\t'].find((each) => first.includes(each)) ?? ',';
  const records = csvRecords(name, content, delimiter);
  const names = records.shift()?.cells ?? [];
  if (new Set(names).size < names.length || !names.every(Boolean)) {
    throw new Told(`${name}: the first line must name the columns, each once.`);
  }
  const rows = records.filter(({ cells }) => cells.length).map(({ cells, line }) => {
    const where = `${name} line ${line}`;
    if (cells.length !== names.length) {
      throw new Told(`${where}: it has ${counted(cells.length, 'cell')}, but the first line names ${counted(names.length, 'column')}.`);
    }
    return { where, row: Object.fromEntries(names.map((column, i) => [column, cells[i]])) };
  });
  return checked(rows, name);
}

/** The cells of each record, none of a blank line, and the line it ends in; as strict as Python's csv. */
function csvRecords(name, content, delimiter) {
  const records = [];
  let [cells, cell, line] = [[], '', 1];
  let state = 'begin'; // of a cell; then 'plain', 'quoted' or 'closed'
  const endCell = () => {
    cells.push(cell);
    [cell, state] = ['', 'begin'];
  };
  const endRecord = () => {
    if (cells.length || state !== 'begin') endCell();
    records.push({ cells, line });
    cells = [];
  };
  for (let i = 0; i < content.length; i++) {
    const c = content[i];
    const ends = c === '\n' || c === '\r';
    if (c === '\r' && content[i + 1] === '\n' && state !== 'quoted') continue;
    if (state === 'quoted') {
      if (c === '"') state = 'closed';
      else cell += c;
    } else if (state === 'closed' && c === '"') {
      [cell, state] = [`${cell}"`, 'quoted'];
    } else if (ends) {
      endRecord();
    } else if (c === delimiter) {
      endCell();
    } else if (state === 'closed') {
      throw new Told(`${name} line ${line}: not valid CSV ('${delimiter}' is expected behind a closing quotation mark).`);
    } else if (c === '"' && state === 'begin') {
      state = 'quoted';
    } else {
      [cell, state] = [cell + c, 'plain'];
    }
    if (c === '\n' || (c === '\r' && content[i + 1] !== '\n')) line++;
  }
  if (state === 'quoted') throw new Told(`${name}: a quotation mark is not closed.`);
  if (cells.length || state !== 'begin') endRecord();
  return records;
}
