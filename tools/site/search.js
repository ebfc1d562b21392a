/* The order of what a search finds: guides, then reference and lessons, and decisions last. Sphinx
   gives a word 15 points in a heading and 5 in the text, however often it is there. */
const PLACES = [
  ["docs/data_parallel", 1], ["docs/reference/", -2], ["docs/learn/", -2], ["docs/glossary", -2],
  ["docs/results/", -3], ["docs/architecture", -3], ["docs/concurrency", -3], ["docs/course", -3],
  ["docs/exercises", -3], ["docs/releasing", -3], ["docs/teach", -3], ["docs/tour", -3],
  ["CONTRIBUTING", -3], ["tests/", -3], ["CHANGELOG", -4], ["docs/decisions/", -11],
];
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2, // these are Sphinx's own
  score: ([page, name, , , points, , kind]) => {
    if (kind === "title") points += 5; // the whole query in one heading
    if (kind === "object" && name.split(".").length > 2) points -= 6; // a method or an attribute
    const place = PLACES.find(([start]) => page.startsWith(start));
    return place ? points + place[1] : points;
  },
};
