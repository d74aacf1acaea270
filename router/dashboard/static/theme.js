// Applies the chosen theme before the page is drawn. The choice is kept in this browser; without one, the
// system's preference holds.
const chosen = localStorage.getItem('roost-theme');
if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen;
