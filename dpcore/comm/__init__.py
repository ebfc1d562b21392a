"""How ranks find each other and talk."""
