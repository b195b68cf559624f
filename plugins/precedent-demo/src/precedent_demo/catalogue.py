"""The invented names, places and products of the order desk.

Databases of the splits "train" and "held-out" share no name, street or city, and no id (see database). Most products
occur in only one split.
"""

from __future__ import annotations

from dataclasses import dataclass

Product = tuple[str, int, tuple[str, str, str]]
"""Name, price in cents, and three options."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The words for the databases of one split."""

    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    streets: tuple[str, ...]
    cities: tuple[str, ...]
    mail_hosts: tuple[str, ...]
    products: tuple[Product, ...]


CARRIERS = ("Swift Parcel", "BlueLine", "Northern Post")
PAYMENT_METHODS = ("credit card", "gift card", "bank transfer")

_IN_BOTH: tuple[Product, ...] = (
    ("desk lamp", 3990, ("black", "white", "brass")),
    ("office chair", 18900, ("grey", "black", "blue")),
    ("water bottle", 1850, ("red", "green", "steel")),
    ("rain jacket", 8900, ("small", "medium", "large")),
    ("wool blanket", 5400, ("cream", "navy", "rust")),
    ("backpack", 7650, ("olive", "black", "blue")),
    ("running shoes", 10950, ("size 39", "size 41", "size 43")),
    ("bookshelf", 15900, ("oak", "white", "black")),
    ("alarm clock", 2480, ("white", "black", "mint")),
    ("frying pan", 4990, ("20 cm", "24 cm", "28 cm")),
)
_HELD_OUT: tuple[Product, ...] = (
    ("hiking boots", 12950, ("size 40", "size 42", "size 44")),
    ("coffee grinder", 6490, ("black", "red", "silver")),
    ("headphones", 14900, ("white", "black", "sand")),
    ("tea kettle", 4475, ("copper", "white", "green")),
    ("bath towel", 2290, ("white", "teal", "grey")),
    ("picture frame", 1640, ("oak", "black", "walnut")),
    ("bicycle helmet", 6900, ("small", "medium", "large")),
    ("garden hose", 3380, ("10 m", "20 m", "30 m")),
    ("yoga mat", 2995, ("purple", "blue", "grey")),
    ("winter gloves", 3150, ("small", "medium", "large")),
)
_TRAIN: tuple[Product, ...] = (
    ("table fan", 4250, ("white", "black", "silver")),
    ("sofa cover", 6380, ("beige", "grey", "green")),
    ("toaster", 3760, ("red", "black", "cream")),
    ("snow shovel", 2840, ("short", "medium", "long")),
    ("leather belt", 3570, ("85 cm", "95 cm", "105 cm")),
    ("board game", 2990, ("classic", "travel", "family")),
    ("umbrella", 2130, ("yellow", "navy", "black")),
    ("camping tent", 17400, ("2 persons", "3 persons", "4 persons")),
    ("sleeping bag", 9720, ("short", "regular", "long")),
    ("ski goggles", 7180, ("orange", "clear", "smoke")),
    ("kitchen scale", 2670, ("white", "steel", "red")),
    ("bread knife", 3320, ("18 cm", "22 cm", "26 cm")),
    ("wall mirror", 8460, ("round", "oval", "square")),
    ("floor rug", 13780, ("blue", "beige", "terracotta")),
    ("tool box", 5890, ("small", "medium", "large")),
    ("cotton shirt", 3940, ("S", "M", "L")),
    ("denim jacket", 9360, ("S", "M", "XL")),
    ("wool socks", 1270, ("size 36", "size 40", "size 45")),
    ("rubber boots", 4830, ("size 37", "size 38", "size 46")),
    ("swim trunks", 2750, ("M", "L", "XL")),
    ("guitar strings", 1490, ("light", "medium", "heavy")),
    ("notebook", 890, ("lined", "plain", "dotted")),
    ("fountain pen", 5620, ("fine", "medium", "broad")),
    ("lunch box", 2310, ("pink", "blue", "grey")),
    ("bird feeder", 1980, ("cedar", "green", "copper")),
    ("flower pot", 1540, ("12 cm", "16 cm", "30 cm")),
    ("bed sheet", 4170, ("white", "sage", "lilac")),
    ("pillow", 3680, ("soft", "medium", "firm")),
    ("phone case", 1890, ("clear", "black", "violet")),
    ("power bank", 3450, ("5000 mAh", "10000 mAh", "20000 mAh")),
)

HELD_OUT = Catalogue(
    # A customer's names come from even positions only or from odd ones only (see database._customers), so that the two
    # request sets share no name.
    first_names=(
        *("Ada", "Bruno", "Carla", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irena", "Jonas"),
        *("Katja", "Leon", "Mira", "Nils", "Olga", "Pavel", "Quinn", "Rosa", "Stefan", "Tilda"),
        *("Ulrich", "Vera", "Walter", "Xenia", "Yannick", "Zelda", "Anton", "Bella", "Conrad", "Dora"),
        *("Emil", "Flora", "Gideon", "Hanna", "Igor", "Judith", "Karl", "Lydia", "Martin", "Nadia"),
    ),
    last_names=(
        *("Abbott", "Berger", "Castle", "Dunn", "Ellery", "Fischer", "Grant", "Holm", "Iversen", "Jansen"),
        *("Keller", "Lindqvist", "Marsh", "Novak", "Orlov", "Parker", "Quist", "Rowan", "Sommer", "Tanner"),
        *("Ulmer", "Vance", "Weber", "Yates", "Zeller", "Archer", "Baxter", "Conway", "Dalton", "Everett"),
        *("Forbes", "Gallo", "Harper", "Ingram", "Joyner", "Kemp", "Lowell", "Mercer", "Nolan", "Osborn"),
    ),
    streets=(
        *("Mill Lane", "Oak Street", "Harbour Road", "Station Street", "Elm Avenue", "Church Hill", "Park Row"),
        *("Bridge Street", "Garden Walk", "Market Square", "Cedar Close", "Quarry Road", "Lake View", "North Gate"),
    ),
    cities=(
        *("Norwick", "Eastbrook", "Halden", "Millford", "Stonebury", "Kingsport", "Rivermouth", "Ashby"),
        *("Greenvale", "Westhaven", "Larkfield", "Redhill", "Dunmore", "Fairview", "Oxley", "Brightwater"),
    ),
    mail_hosts=("example.com", "lettermail.example", "harbour.example"),
    products=(*_IN_BOTH, *_HELD_OUT),
)

TRAIN = Catalogue(
    first_names=(
        *("Alice", "Amir", "Amelia", "Arthur", "Astrid", "Axel", "Beatrice", "Ben", "Bianca", "Boris", "Bridget"),
        *("Caleb", "Camille", "Carlos", "Cecilia", "Chloe", "Clara", "Colin", "Daisy", "Daniel", "Daphne", "David"),
        *("Deepak", "Diana", "Dominic", "Edgar", "Elena", "Eli", "Eloise", "Emma", "Erik", "Esther", "Ethan"),
        *("Eva", "Fatima", "Fiona", "Frank", "Freya", "Gabriel", "George", "Gloria", "Grace", "Hannah", "Harry"),
        *("Hector", "Heidi", "Helen", "Henry", "Ian", "Ida", "Ingrid", "Isaac", "Ivan", "Jack", "Jasmine", "Joan"),
        *("Joel", "Julia", "Kai", "Kate", "Kenji", "Kofi", "Lara", "Lena", "Liam", "Lina", "Louis", "Lucas"),
        *("Luna", "Mabel", "Marco", "Maria", "Maya", "Megan", "Miguel", "Mona", "Naomi", "Nathan", "Nina", "Noah"),
        *("Nora", "Oliver", "Omar", "Oscar", "Paula", "Peter", "Philip", "Priya", "Rachel", "Ralph", "Ravi"),
        *("Robin", "Ruby", "Ruth", "Samir", "Sara", "Sean", "Sofia", "Tara", "Theo", "Tom", "Uma", "Victor"),
        *("Viola", "Wendy", "Will", "Yara", "Yusuf", "Zoe"),
    ),
    last_names=(
        *("Adams", "Aldridge", "Alvarez", "Andersen", "Arnold", "Bailey", "Barker", "Bauer", "Becker", "Bell"),
        *("Bennett", "Bishop", "Blake", "Bolton", "Bradley", "Brandt", "Brook", "Burns", "Carter", "Chan", "Clark"),
        *("Coleman", "Cook", "Costa", "Craig", "Cruz", "Curtis", "Davies", "Diaz", "Dixon", "Doyle", "Eaton"),
        *("Edwards", "Ellis", "Farrell", "Ferrari", "Finch", "Fleming", "Flores", "Foster", "Fox", "Garcia"),
        *("Gibson", "Gomez", "Graves", "Gupta", "Haas", "Hale", "Hansen", "Hart", "Hayes", "Hill", "Hoffman"),
        *("Hughes", "Hunt", "Ito", "Jacobs", "James", "Jensen", "Jones", "Khan", "King", "Klein", "Knight"),
        *("Kowalski", "Kumar", "Lam", "Lane", "Larsen", "Lee", "Lopez", "Lund", "Mason", "Mendez", "Meyer"),
        *("Miller", "Moore", "Moreau", "Morris", "Murphy", "Nash", "Nielsen", "Okafor", "Olsen", "Owens", "Park"),
        *("Patel", "Perry", "Petrov", "Price", "Quinlan", "Reed", "Reyes", "Rice", "Rossi", "Ruiz", "Ryan"),
        *("Santos", "Schmidt", "Shaw", "Silva", "Singh", "Stone", "Tate", "Turner", "Vogel", "Wagner", "Walsh"),
        *("Watts", "West", "Wolf", "Wong", "Wood", "Young", "Zhang"),
    ),
    streets=(
        *("Acorn Drive", "Baker Street", "Beech Road", "Birch Lane", "Broad Street", "Canal Street", "Castle Road"),
        *("Chapel Lane", "Cherry Walk", "Coast Road", "College Street", "Dale Avenue", "Field Lane", "Forest Road"),
        *("Glen Road", "Green Street", "Grove Avenue", "High Street", "Hillside", "Ivy Close", "Juniper Way"),
        *("King Street", "Linden Avenue", "London Road", "Long Lane", "Main Street", "Maple Drive", "Meadow View"),
        *("Orchard Road", "Pine Street", "Pond Lane", "Poplar Walk", "Queen Street", "River Road", "Rose Garden"),
        *("School Lane", "Silver Street", "South Parade", "Spring Hill", "Tower Road", "Valley Drive", "Victoria Road"),
        *("Walnut Court", "Water Lane", "Willow Way", "Windmill Hill", "Wood Street", "York Place"),
    ),
    cities=(
        *("Aldbury", "Barrowby", "Bellford", "Bramley", "Bridgeton", "Burnside", "Calder", "Carlow", "Clayton"),
        *("Cliffton", "Colbridge", "Crosby", "Darwick", "Deerfield", "Easton", "Elmwood", "Fernhill", "Foxdale"),
        *("Glenmore", "Grantham", "Hartley", "Haverly", "Hillcrest", "Holbrook", "Kirkby", "Lakewood", "Langford"),
        *("Linton", "Maplewood", "Marlow", "Melrose", "Newbury", "Northam", "Oakham", "Penrose", "Pinehurst"),
        *("Queensferry", "Ravenwood", "Richford", "Rosewood", "Seaford", "Sherwood", "Southwell", "Stanton"),
        *("Sutton", "Thornbury", "Upton", "Waterford", "Wellsby", "Weston", "Whitby", "Winslow", "Wyndham"),
    ),
    mail_hosts=(
        *("example.org", "example.net", "mail.example", "post.example", "inbox.example", "webmail.example"),
        *("home.example", "quickmail.example", "letters.example", "cloud.example"),
    ),
    products=(*_IN_BOTH, *_TRAIN),
)

CATALOGUES = {"held-out": HELD_OUT, "train": TRAIN}
