/** Rows of a file that was dropped: JSON Lines, JSON, CSV. */

import { Told } from './device.mjs';

/**
 * @param {string} name The file's name, whose ending tells its kind.
 * @param {string} text Its content.
 * @returns {{where: string, row: object}[]}
 * @throws {Told} If it is none of them, or damaged.
 */
export function rowsOf(name, text) {
  const kind = name.split('.').pop().toLowerCase();
  const content = text.replace(/^\ufeff/, '');
  if (kind === 'jsonl' || kind === 'ndjson') return jsonLines(name, content);
  if (kind === 'json') return content.trimStart().startsWith('[') ? jsonList(name, content) : jsonLines(name, content);
  if (kind === 'csv' || kind === 'tsv') return csvRows(name, content);
  if (kind === 'txt' || kind === 'md') {
    throw new Told(`${name} is a text without rows: put each text into a line of a .jsonl file, as {"text": "..."}.`);
  }
  throw new Told(`${name} is of no known kind: use .jsonl, .json or .csv.`);
}

function jsonLines(name, content) {
  const rows = [];
  content.split('\n').forEach((line, index) => {
    if (line.trim()) rows.push({ where: `${name} line ${index + 1}`, row: parsed(line, `${name} line ${index + 1}`) });
  });
  return checked(rows, name);
}

function jsonList(name, content) {
  const list = parsed(content, name);
  return checked(list.map((row, index) => ({ where: `${name} row ${index + 1}`, row })), name);
}

function parsed(text, where) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Told(`${where} is not valid JSON (${error.message}).`);
  }
}

function checked(rows, name) {
  if (!rows.length) throw new Told(`${name} has no rows.`);
  for (const { where, row } of rows) {
    if (!row || typeof row !== 'object' || Array.isArray(row)) throw new Told(`${where}: a row must be a JSON object.`);
  }
  return rows;
}

/** Comma-separated values, by semicolons or tabs where the first line has no comma. */
function csvRows(name, content) {
  const first = content.split('\n', 1)[0];
  const delimiter = [',', ';', '\t'].find((each) => first.includes(each)) ?? ',';
  const records = csvRecords(name, content, delimiter);
  const names = records.shift()?.cells ?? [];
  if (new Set(names).size < names.length || !names.every((each) => each.trim())) {
    throw new Told(`${name}: the first line must name the columns, each once.`);
  }
  const rows = records.filter(({ cells }) => cells.length > 1 || cells[0] !== '').map(({ cells, line }) => {
    const where = `${name} line ${line}`;
    if (cells.length !== names.length) {
      throw new Told(`${where}: it has ${cells.length} cells, but the first line names ${names.length} columns.`);
    }
    return { where, row: Object.fromEntries(names.map((column, i) => [column, cells[i]])) };
  });
  return checked(rows, name);
}

function csvRecords(name, content, delimiter) {
  const records = [];
  let cells = [''];
  let [quoted, line] = [false, 1];
  for (let i = 0; i < content.length; i++) {
    const c = content[i];
    if (c === '\n') line++;
    if (quoted) {
      if (c !== '"') cells[cells.length - 1] += c;
      else if (content[i + 1] === '"') cells[cells.length - 1] += content[i++];
      else quoted = false;
    } else if (c === '"' && cells.at(-1) === '') quoted = true;
    else if (c === delimiter) cells.push('');
    else if (c === '\n') {
      records.push({ cells, line: line - 1 });
      cells = [''];
    } else if (c !== '\r') cells[cells.length - 1] += c;
  }
  if (quoted) throw new Told(`${name}: a quotation mark is not closed.`);
  if (cells.length > 1 || cells[0]) records.push({ cells, line });
  return records;
}
