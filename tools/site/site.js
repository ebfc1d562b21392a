/* The sidebar is longer than the window: it begins at the page that is open. */
const sidebar = document.querySelector(".sidebar-scroll");
const here = sidebar.querySelector(".current-page");
if (here) {
  const below = here.getBoundingClientRect().top - sidebar.getBoundingClientRect().top;
  sidebar.scrollTo({ top: below - sidebar.clientHeight / 2, behavior: "instant" });
}
