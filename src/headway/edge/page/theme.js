// Before anything is painted: the theme chosen earlier, if one was. A classic script, so that it
// runs before the page is drawn; main.js has the button.
{
  const kept = localStorage.getItem("headway-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
}
