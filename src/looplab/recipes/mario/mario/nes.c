/* A console for the game: the 6502 processor and the picture unit of the NES, for cartridges without extra hardware.

   It does what Super Mario Bros. can observe, and leaves out the rest: sound, undocumented instructions, and changes
   of the picture in the middle of a line. A frame begins with line 240, the first that is not shown, so that a call
   runs the program's work of one frame and then draws it. Time is counted in dots: 341 per line, 262 lines per frame,
   three per cycle of the processor. Nothing is allocated, and everything that later frames depend on is in one struct
   without pointers, which is the snapshot. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { WIDTH = 256, LINES = 240, LINE_DOTS = 341, FRAME_LINES = 262, SPRITES_PER_LINE = 8 };
enum { LEFT = 8, TOP = 8, SHOWN_WIDTH = 240, SHOWN_LINES = 224 }; /* without the border that televisions hid */
enum { CARRY = 1, ZERO = 2, IRQ_OFF = 4, DECIMAL = 8, BREAK = 16, UNUSED = 32, OVERFLOW = 64, NEGATIVE = 128 };
enum { VBLANK = 0x80, SPRITE_ZERO = 0x40 };

typedef struct {
    uint8_t ram[2048], names[2048], palette[32], sprites[256];
    int32_t clock; /* dots since the start of this frame */
    int32_t line;  /* the line being shown; -1 outside of them */
    int32_t line_start;
    uint16_t pc, v, t;
    uint8_t a, x, y, s, p, nmi;
    uint8_t ctrl, mask, status, sprite_address, fine_x, toggle, read_buffer, latch;
    uint8_t strobe, shift, buttons, short_frame, warming_up, jammed, unused[2];
} State;

typedef struct {
    uint64_t rows[2][256][8]; /* the patterns: eight pixels of two bits, a byte each, the leftmost first */
    uint8_t prg[32768];
    uint8_t vertical; /* how the two name tables are mirrored */
} Cartridge;

typedef struct {
    State state, before; /* now, and before the last frame */
    const Cartridge *cartridge;
    uint8_t drawn; /* whether `picture` shows the last frame */
    uint8_t picture[LINES][WIDTH];
    uint8_t listed_sprites[LINES][SPRITES_PER_LINE], sprite_count[LINES], sprites_listed;
    int32_t hit_line, hit_x; /* where sprite 0 meets the background in this line; -1: nowhere */
} Console;

static const uint8_t CYCLES[256] = {
    7, 6, 0, 0, 0, 3, 5, 0, 3, 2, 2, 0, 0, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    6, 6, 0, 0, 3, 3, 5, 0, 4, 2, 2, 0, 4, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    6, 6, 0, 0, 0, 3, 5, 0, 3, 2, 2, 0, 3, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    6, 6, 0, 0, 0, 3, 5, 0, 4, 2, 2, 0, 5, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    0, 6, 0, 0, 3, 3, 3, 0, 2, 0, 2, 0, 4, 4, 4, 0, 2, 6, 0, 0, 4, 4, 4, 0, 2, 5, 2, 0, 0, 5, 0, 0,
    2, 6, 2, 0, 3, 3, 3, 0, 2, 2, 2, 0, 4, 4, 4, 0, 2, 5, 0, 0, 4, 4, 4, 0, 2, 4, 2, 0, 4, 4, 4, 0,
    2, 6, 0, 0, 3, 3, 5, 0, 2, 2, 2, 0, 4, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    2, 6, 0, 0, 3, 3, 5, 0, 2, 2, 2, 0, 4, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
}; /* 0: an instruction that is not documented */

static int rendering(const State *s) { return (s->mask & 0x18) != 0; }

static int name_offset(const Console *c, unsigned address) {
    unsigned table = c->cartridge->vertical ? (address >> 10) & 1 : (address >> 11) & 1;
    return (int)(table << 10 | (address & 0x3FF));
}

static int palette_offset(unsigned address) { return (int)((address & 3) ? address & 31 : address & 15); }

/* The background of a line, from its left edge: 4 bits per pixel, 0 where it is transparent. */
static void background(const Console *c, uint8_t *line) {
    const State *s = &c->state;
    if (!(s->mask & 0x08)) {
        memset(line, 0, WIDTH);
        return;
    }
    uint64_t tiles[33];
    const uint64_t(*rows)[8] = c->cartridge->rows[s->ctrl >> 4 & 1];
    unsigned v = s->v, fine_y = v >> 12 & 7, down = v >> 4 & 4, column = v & 31, table = v & 0xC00;
    for (int i = 0; i < 33; table ^= 0x400, column = 0) { /* a name table is 32 tiles wide */
        const uint8_t *names = s->names + name_offset(c, table | (v & 0x3E0));
        const uint8_t *groups = s->names + name_offset(c, table | 0x3C0 | (v >> 4 & 0x38));
        for (; column < 32 && i < 33; column++, i++) {
            uint64_t pixels = rows[names[column]][fine_y];
            uint64_t opaque = (pixels | pixels >> 1) & 0x0101010101010101u;
            uint64_t colours = groups[column >> 2] >> (down | (column & 2)) & 3;
            tiles[i] = pixels | opaque * (colours << 2);
        }
    }
    memcpy(line, (uint8_t *)tiles + s->fine_x, WIDTH);
    if (!(s->mask & 0x02)) memset(line, 0, 8);
}

static uint64_t sprite_row(const Console *c, const uint8_t *sprite, int row) {
    const State *s = &c->state;
    unsigned tile = sprite[1], table = s->ctrl >> 3 & 1;
    int height = s->ctrl & 0x20 ? 16 : 8;
    if (sprite[2] & 0x80) row = height - 1 - row;
    if (height == 16) table = tile & 1, tile = (tile & 0xFE) + (row >> 3), row &= 7;
    uint64_t pixels = c->cartridge->rows[table][tile][row];
    return sprite[2] & 0x40 ? __builtin_bswap64(pixels) : pixels;
}

static int in_line(const State *s, const uint8_t *sprite, int line) {
    unsigned row = (unsigned)(line - 1 - sprite[0]);
    return sprite[0] < 239 && row < (s->ctrl & 0x20 ? 16u : 8u);
}

/* Where sprite 0 meets the background in this line; -1: nowhere. */
static int find_hit(Console *c, int line) {
    const State *s = &c->state;
    if (c->hit_line == line) return c->hit_x;
    c->hit_line = line;
    c->hit_x = -1;
    if ((s->mask & 0x18) != 0x18 || !in_line(s, s->sprites, line)) return -1;
    uint8_t behind[WIDTH], pixels[8];
    uint64_t row = sprite_row(c, s->sprites, line - 1 - s->sprites[0]);
    background(c, behind);
    memcpy(pixels, &row, 8);
    for (int i = 0; i < 8; i++) {
        int x = s->sprites[3] + i;
        if (x < 255 && pixels[i] && behind[x] && (x >= 8 || (s->mask & 0x06) == 0x06)) return c->hit_x = x;
    }
    return -1;
}

static void list_sprites(Console *c) {
    const State *s = &c->state;
    memset(c->sprite_count, 0, sizeof c->sprite_count);
    for (int i = 0; i < 64; i++) {
        int top = s->sprites[4 * i] + 1, height = s->ctrl & 0x20 ? 16 : 8;
        for (int line = top; line < top + height && line < LINES; line++)
            if (c->sprite_count[line] < SPRITES_PER_LINE) c->listed_sprites[line][c->sprite_count[line]++] = (uint8_t)i;
    }
    c->sprites_listed = 1;
}

/* Colours of 16 pixels at a time. x86 has this shuffle since SSSE3, which the base flags do not include. */
typedef uint8_t Pixels __attribute__((vector_size(16)));
#ifdef __clang__
static Pixels SHUFFLE(Pixels table, Pixels indices) {
    Pixels found;
    for (int i = 0; i < 16; i++) found[i] = table[indices[i] & 15];
    return found;
}
#else
#define SHUFFLE(table, indices) __builtin_shuffle(table, indices)
#ifdef __x86_64__
__attribute__((target("ssse3")))
#endif
#endif
static void to_colours(uint8_t *out, const uint8_t *back, const uint8_t *front, const uint8_t *colours) {
    Pixels back_colours, front_colours;
    memcpy(&back_colours, colours, 16);
    memcpy(&front_colours, colours + 16, 16);
    for (int x = 0; x < WIDTH; x += 16) {
        Pixels b, f, shown;
        memcpy(&b, back + x, 16);
        shown = SHUFFLE(back_colours, b);
        if (front) {
            memcpy(&f, front + x, 16);
            Pixels over = (Pixels)(f != 0) & ~((Pixels)((f & 0x40) != 0) & (Pixels)(b != 0));
            shown = (SHUFFLE(front_colours, f & 15) & over) | (shown & ~over);
        }
        memcpy(out + x, &shown, 16);
    }
}

static void draw_line(Console *c, int line) {
    const State *s = &c->state;
    uint8_t *out = c->picture[line];
    uint8_t grey = s->mask & 1 ? 0x30 : 0x3F, colours[32], back[WIDTH], front[WIDTH + 8];
    for (int i = 0; i < 32; i++) colours[i] = s->palette[i & 3 ? i : 0] & grey;
    if (!rendering(s)) {
        memset(out, colours[0], WIDTH);
        return;
    }
    background(c, back);
    if (!c->sprites_listed) list_sprites(c);
    int count = s->mask & 0x10 ? c->sprite_count[line] : 0;
    if (count) memset(front, 0, sizeof front);
    for (int i = count - 1; i >= 0; i--) { /* the first sprite of the list wins */
        const uint8_t *sprite = s->sprites + 4 * c->listed_sprites[line][i];
        uint64_t pixels = sprite_row(c, sprite, line - 1 - sprite[0]), below;
        uint64_t opaque = (pixels | pixels >> 1) & 0x0101010101010101u;
        memcpy(&below, front + sprite[3], 8);
        below &= ~(opaque * 255);
        below |= pixels | opaque * (0x10u | (sprite[2] & 3u) << 2 | (sprite[2] & 0x20u) << 1);
        memcpy(front + sprite[3], &below, 8);
    }
    if (count && !(s->mask & 0x04)) memset(front, 0, 8);
    to_colours(out, back, count ? front : NULL, colours);
}

/* Before the picture unit's state changes in the middle of a shown line: whatever was shown of it has the old state. */
static void before_change(Console *c) {
    State *s = &c->state;
    if (s->line >= 0 && s->clock - s->line_start < 256) (void)find_hit(c, s->line);
}

static uint8_t read_port(Console *c, unsigned address) {
    State *s = &c->state;
    if (address < 0x4000) {
        switch (address & 7) {
        case 2:
            if (s->line >= 0 && !(s->status & SPRITE_ZERO)) {
                int x = find_hit(c, s->line);
                if (x >= 0 && s->clock - s->line_start > x) s->status |= SPRITE_ZERO;
            }
            s->latch = (uint8_t)((s->status & 0xE0) | (s->latch & 0x1F));
            s->status &= (uint8_t)~VBLANK;
            s->toggle = 0;
            return s->latch;
        case 4:
            return s->latch = s->sprites[s->sprite_address];
        case 7: {
            unsigned at = s->v & 0x3FFF;
            uint8_t value = s->read_buffer;
            if (at >= 0x3F00) value = s->palette[palette_offset(at)];
            if (at >= 0x2000) {
                s->read_buffer = s->names[name_offset(c, at)];
            } else {
                uint64_t row = c->cartridge->rows[at >> 12][at >> 4 & 255][at & 7];
                uint8_t pixels[8];
                memcpy(pixels, &row, 8);
                s->read_buffer = 0;
                for (int i = 0; i < 8; i++)
                    s->read_buffer = (uint8_t)(s->read_buffer << 1 | (pixels[i] >> (at >> 3 & 1) & 1));
            }
            s->v = (uint16_t)((s->v + (s->ctrl & 4 ? 32 : 1)) & 0x7FFF);
            return s->latch = value;
        }
        default:
            return s->latch;
        }
    }
    if (address == 0x4016) {
        uint8_t bit = s->strobe ? s->buttons & 1 : s->shift & 1;
        if (!s->strobe) s->shift = (uint8_t)(s->shift >> 1 | 0x80);
        return 0x40 | bit;
    }
    return address == 0x4015 ? 0 : (uint8_t)(address >> 8);
}

static uint8_t peek(const Console *c, unsigned address) {
    if (address < 0x2000) return c->state.ram[address & 0x7FF];
    return address >= 0x8000 ? c->cartridge->prg[address & 0x7FFF] : 0;
}

static void write_port(Console *c, unsigned address, uint8_t value) {
    State *s = &c->state;
    if (address == 0x4014) {
        for (unsigned i = 0; i < 256; i++) s->sprites[(s->sprite_address + i) & 255] = peek(c, (unsigned)value << 8 | i);
        c->sprites_listed = 0;
        s->clock += 3 * 513;
    } else if (address == 0x4016) {
        if (s->strobe && !(value & 1)) s->shift = s->buttons;
        s->strobe = value & 1;
    }
    if (address >= 0x4000) return;
    s->latch = value;
    switch (address & 7) {
    case 0:
        before_change(c);
        if ((s->status & VBLANK) && !(s->ctrl & 0x80) && (value & 0x80)) s->nmi = 1;
        if ((s->ctrl ^ value) & 0x20) c->sprites_listed = 0;
        s->ctrl = value;
        s->t = (uint16_t)((s->t & 0x73FF) | (value & 3) << 10);
        break;
    case 1:
        before_change(c);
        s->mask = value;
        break;
    case 3:
        s->sprite_address = value;
        break;
    case 4:
        s->sprites[s->sprite_address++] = value;
        c->sprites_listed = 0;
        break;
    case 5:
        before_change(c);
        if (!s->toggle) {
            s->t = (uint16_t)((s->t & 0x7FE0) | value >> 3);
            s->fine_x = value & 7;
        } else {
            s->t = (uint16_t)((s->t & 0x0C1F) | (value & 7) << 12 | (value & 0xF8) << 2);
        }
        s->toggle ^= 1;
        break;
    case 6:
        before_change(c);
        if (!s->toggle) {
            s->t = (uint16_t)((s->t & 0xFF) | (value & 0x3F) << 8);
        } else {
            s->t = (uint16_t)((s->t & 0x7F00) | value);
            s->v = s->t;
        }
        s->toggle ^= 1;
        break;
    case 7: {
        unsigned at = s->v & 0x3FFF;
        if (at >= 0x3F00) s->palette[palette_offset(at)] = value & 0x3F;
        else if (at >= 0x2000) s->names[name_offset(c, at)] = value;
        s->v = (uint16_t)((s->v + (s->ctrl & 4 ? 32 : 1)) & 0x7FFF);
    }
    }
}

/* Run instructions until the clock has reached a time. */
static void run(Console *c, int32_t until) {
    State *s = &c->state;
    const uint8_t *prg = c->cartridge->prg;
    uint8_t *ram = s->ram;
    int32_t clock = s->clock;
    unsigned a = s->a, x = s->x, y = s->y, sp = s->s, p = s->p, pc = s->pc, at, value, low, result;

#define READ(address)                                                                                                  \
    ((at = (address)) < 0x2000 ? ram[at & 0x7FF] : at >= 0x8000 ? prg[at & 0x7FFF] : (s->clock = clock, read_port(c, at)))
#define WRITE(address, byte)                                                                                           \
    do {                                                                                                               \
        if ((at = (address)) < 0x2000) ram[at & 0x7FF] = (uint8_t)(byte);                                              \
        else s->clock = clock, write_port(c, at, (uint8_t)(byte)), clock = s->clock;                                   \
    } while (0)
#define FETCH() (pc++, pc > 0x8000 ? prg[(pc - 1) & 0x7FFF] : ram[(pc - 1) & 0x7FF]) /* programs run in ROM or RAM */
#define PUSH(byte) (ram[0x100 | sp] = (uint8_t)(byte), sp = (sp - 1) & 255)
#define PULL() (sp = (sp + 1) & 255, ram[0x100 | sp])
/* The flags ZERO and NEGATIVE are those of the last result; bit 8 stands for a negative zero, which BIT can make. */
#define FLAGS(byte) (result = (byte))
#define IS_ZERO() (!(result & 0xFF))
#define IS_NEGATIVE() (result & 0x180)
#define PACK() ((p & ~(unsigned)(ZERO | NEGATIVE)) | (IS_ZERO() ? ZERO : 0u) | (IS_NEGATIVE() ? NEGATIVE : 0u))
#define UNPACK(byte) (p = (byte), result = (p & ZERO ? 0u : 1u) | (p & NEGATIVE) << 1)
#define ZP() FETCH()
#define ZPX() ((FETCH() + x) & 255)
#define ZPY() ((FETCH() + y) & 255)
#define WORD(address) (ram[(address) & 255] | ram[((address) + 1) & 255] << 8)
#define ABS() (low = FETCH(), low | (unsigned)FETCH() << 8)
#define CROSS(base, index) ((((base) & 255) + (index) > 255) ? (clock += 3) : 0)
#define ABSX() (ABSOLUTE(), (ea + x) & 0xFFFF)
#define ABSOLUTE() (ea = ABS())
#define ABSXP() (ABSOLUTE(), CROSS(ea, x), (ea + x) & 0xFFFF)
#define ABSYP() (ABSOLUTE(), CROSS(ea, y), (ea + y) & 0xFFFF)
#define ABSY() (ABSOLUTE(), (ea + y) & 0xFFFF)
#define INDX() (ea = ZPX(), (unsigned)WORD(ea))
#define INDY() (ea = ZP(), ea = (unsigned)WORD(ea), (ea + y) & 0xFFFF)
#define INDYP() (ea = ZP(), ea = (unsigned)WORD(ea), CROSS(ea, y), (ea + y) & 0xFFFF)
#define LOAD(reg, address) value = (address), reg = READ(value), FLAGS(reg)
#define ADD(byte)                                                                                                      \
    do {                                                                                                               \
        unsigned m = (byte), sum = a + m + (p & CARRY);                                                                \
        p = (p & ~(unsigned)(CARRY | OVERFLOW)) | sum >> 8 | ((~(a ^ m) & (a ^ sum) & 0x80) >> 1);                     \
        a = sum & 255;                                                                                                 \
        FLAGS(a);                                                                                                      \
    } while (0)
#define COMPARE(reg, byte)                                                                                             \
    do {                                                                                                               \
        unsigned m = (byte), difference = (reg - m) & 255;                                                             \
        p = (p & ~(unsigned)CARRY) | (reg >= m ? CARRY : 0);                                                           \
        FLAGS(difference);                                                                                             \
    } while (0)
#define MODIFY(address, change)                                                                                        \
    do {                                                                                                               \
        unsigned where = (address), m = READ(where);                                                                   \
        change;                                                                                                        \
        WRITE(where, m);                                                                                               \
        FLAGS(m);                                                                                                      \
    } while (0)
#define ASL() (p = (p & ~(unsigned)CARRY) | m >> 7, m = m << 1 & 255)
#define LSR() (p = (p & ~(unsigned)CARRY) | (m & 1), m >>= 1)
#define ROL() (low = p & CARRY, p = (p & ~(unsigned)CARRY) | m >> 7, m = (m << 1 & 255) | low)
#define ROR() (low = p & CARRY, p = (p & ~(unsigned)CARRY) | (m & 1), m = m >> 1 | low << 7)
#define ACCUMULATOR(change)                                                                                            \
    do {                                                                                                               \
        unsigned m = a;                                                                                                \
        change;                                                                                                        \
        a = m;                                                                                                         \
        FLAGS(a);                                                                                                      \
    } while (0)
#define BRANCH(condition)                                                                                              \
    do {                                                                                                               \
        int offset = (int8_t)FETCH();                                                                                  \
        if (condition) {                                                                                               \
            unsigned to = (unsigned)((int)pc + offset) & 0xFFFF;                                                       \
            clock += (to ^ pc) & 0xFF00 ? 6 : 3;                                                                       \
            pc = to;                                                                                                   \
        }                                                                                                              \
    } while (0)
#define ALU(op, imm, zp, zpx, abs, absx, absy, indx, indy)                                                             \
    case imm: op(FETCH()); break;                                                                                      \
    case zp: op(ram[ZP()]); break;                                                                                     \
    case zpx: op(ram[ZPX()]); break;                                                                                   \
    case abs: value = ABS(); op(READ(value)); break;                                                                   \
    case absx: value = ABSXP(); op(READ(value)); break;                                                                \
    case absy: value = ABSYP(); op(READ(value)); break;                                                                \
    case indx: value = INDX(); op(READ(value)); break;                                                                 \
    case indy: value = INDYP(); op(READ(value)); break;
#define OR(byte) (a |= (byte), FLAGS(a))
#define AND(byte) (a &= (byte), FLAGS(a))
#define XOR(byte) (a ^= (byte), FLAGS(a))
#define SUBTRACT(byte) ADD((unsigned)(byte) ^ 255)
#define COMPARE_A(byte) COMPARE(a, byte)
#define LOAD_A(byte) (a = (byte), FLAGS(a))
#define CHANGE(op, zp, zpx, abs, absx)                                                                                 \
    case zp: MODIFY(ZP(), op); break;                                                                                  \
    case zpx: MODIFY(ZPX(), op); break;                                                                                \
    case abs: MODIFY(ABS(), op); break;                                                                                \
    case absx: MODIFY(ABSX(), op); break;
#define BIT(byte)                                                                                                      \
    do {                                                                                                               \
        unsigned m = (byte);                                                                                           \
        p = (p & ~(unsigned)OVERFLOW) | (m & OVERFLOW);                                                                \
        result = (m & a ? 1u : 0u) | (m & NEGATIVE) << 1;                                                              \
    } while (0)

    unsigned ea;
    UNPACK(p);
    while (clock < until && !s->jammed) {
        if (s->nmi) {
            s->nmi = 0;
            PUSH(pc >> 8);
            PUSH(pc);
            PUSH((PACK() & ~(unsigned)BREAK) | UNUSED);
            p |= IRQ_OFF;
            pc = prg[0x7FFA] | (unsigned)prg[0x7FFB] << 8;
            clock += 3 * 7;
            continue;
        }
        unsigned opcode = FETCH();
        clock += 3 * CYCLES[opcode];
        switch (opcode) {
            ALU(OR, 0x09, 0x05, 0x15, 0x0D, 0x1D, 0x19, 0x01, 0x11)
            ALU(AND, 0x29, 0x25, 0x35, 0x2D, 0x3D, 0x39, 0x21, 0x31)
            ALU(XOR, 0x49, 0x45, 0x55, 0x4D, 0x5D, 0x59, 0x41, 0x51)
            ALU(ADD, 0x69, 0x65, 0x75, 0x6D, 0x7D, 0x79, 0x61, 0x71)
            ALU(SUBTRACT, 0xE9, 0xE5, 0xF5, 0xED, 0xFD, 0xF9, 0xE1, 0xF1)
            ALU(COMPARE_A, 0xC9, 0xC5, 0xD5, 0xCD, 0xDD, 0xD9, 0xC1, 0xD1)
            ALU(LOAD_A, 0xA9, 0xA5, 0xB5, 0xAD, 0xBD, 0xB9, 0xA1, 0xB1)
            CHANGE(ASL(), 0x06, 0x16, 0x0E, 0x1E)
            CHANGE(LSR(), 0x46, 0x56, 0x4E, 0x5E)
            CHANGE(ROL(), 0x26, 0x36, 0x2E, 0x3E)
            CHANGE(ROR(), 0x66, 0x76, 0x6E, 0x7E)
            CHANGE(m = (m + 1) & 255, 0xE6, 0xF6, 0xEE, 0xFE)
            CHANGE(m = (m - 1) & 255, 0xC6, 0xD6, 0xCE, 0xDE)
        case 0x0A: ACCUMULATOR(ASL()); break;
        case 0x4A: ACCUMULATOR(LSR()); break;
        case 0x2A: ACCUMULATOR(ROL()); break;
        case 0x6A: ACCUMULATOR(ROR()); break;
        case 0xA2: x = FETCH(); FLAGS(x); break;
        case 0xA6: x = ram[ZP()]; FLAGS(x); break;
        case 0xB6: x = ram[ZPY()]; FLAGS(x); break;
        case 0xAE: LOAD(x, ABS()); break;
        case 0xBE: LOAD(x, ABSYP()); break;
        case 0xA0: y = FETCH(); FLAGS(y); break;
        case 0xA4: y = ram[ZP()]; FLAGS(y); break;
        case 0xB4: y = ram[ZPX()]; FLAGS(y); break;
        case 0xAC: LOAD(y, ABS()); break;
        case 0xBC: LOAD(y, ABSXP()); break;
        case 0x85: ram[ZP()] = (uint8_t)a; break;
        case 0x95: ram[ZPX()] = (uint8_t)a; break;
        case 0x8D: value = ABS(); WRITE(value, a); break;
        case 0x9D: value = ABSX(); WRITE(value, a); break;
        case 0x99: value = ABSY(); WRITE(value, a); break;
        case 0x81: value = INDX(); WRITE(value, a); break;
        case 0x91: value = INDY(); WRITE(value, a); break;
        case 0x86: ram[ZP()] = (uint8_t)x; break;
        case 0x96: ram[ZPY()] = (uint8_t)x; break;
        case 0x8E: value = ABS(); WRITE(value, x); break;
        case 0x84: ram[ZP()] = (uint8_t)y; break;
        case 0x94: ram[ZPX()] = (uint8_t)y; break;
        case 0x8C: value = ABS(); WRITE(value, y); break;
        case 0xE0: COMPARE(x, FETCH()); break;
        case 0xE4: COMPARE(x, ram[ZP()]); break;
        case 0xEC: value = ABS(); COMPARE(x, READ(value)); break;
        case 0xC0: COMPARE(y, FETCH()); break;
        case 0xC4: COMPARE(y, ram[ZP()]); break;
        case 0xCC: value = ABS(); COMPARE(y, READ(value)); break;
        case 0x24: BIT(ram[ZP()]); break;
        case 0x2C: value = ABS(); BIT(READ(value)); break;
        case 0x10: BRANCH(!IS_NEGATIVE()); break;
        case 0x30: BRANCH(IS_NEGATIVE()); break;
        case 0x50: BRANCH(!(p & OVERFLOW)); break;
        case 0x70: BRANCH(p & OVERFLOW); break;
        case 0x90: BRANCH(!(p & CARRY)); break;
        case 0xB0: BRANCH(p & CARRY); break;
        case 0xD0: BRANCH(!IS_ZERO()); break;
        case 0xF0: BRANCH(IS_ZERO()); break;
        case 0x4C:
            value = ABS();
            /* A jump to itself waits for the interrupt: the clock is all that changes. */
            if (value == pc - 3 && clock < until) clock += (until - clock + 8) / 9 * 9;
            pc = value;
            break;
        case 0x6C:
            value = ABS();
            low = READ(value);
            pc = low | (unsigned)READ((value & 0xFF00) | ((value + 1) & 255)) << 8;
            break;
        case 0x20:
            value = ABS();
            PUSH((pc - 1) >> 8);
            PUSH(pc - 1);
            pc = value;
            break;
        case 0x60: low = PULL(); pc = ((low | (unsigned)PULL() << 8) + 1) & 0xFFFF; break;
        case 0x40: low = PULL(); UNPACK(low); low = PULL(); pc = low | (unsigned)PULL() << 8; break;
        case 0x00:
            pc++;
            PUSH(pc >> 8);
            PUSH(pc);
            PUSH(PACK() | BREAK | UNUSED);
            p |= IRQ_OFF;
            pc = prg[0x7FFE] | (unsigned)prg[0x7FFF] << 8;
            break;
        case 0x48: PUSH(a); break;
        case 0x68: a = PULL(); FLAGS(a); break;
        case 0x08: PUSH(PACK() | BREAK | UNUSED); break;
        case 0x28: low = PULL(); UNPACK(low); break;
        case 0x18: p &= ~(unsigned)CARRY; break;
        case 0x38: p |= CARRY; break;
        case 0x58: p &= ~(unsigned)IRQ_OFF; break;
        case 0x78: p |= IRQ_OFF; break;
        case 0xB8: p &= ~(unsigned)OVERFLOW; break;
        case 0xD8: p &= ~(unsigned)DECIMAL; break;
        case 0xF8: p |= DECIMAL; break;
        case 0xAA: x = a; FLAGS(x); break;
        case 0xA8: y = a; FLAGS(y); break;
        case 0x8A: a = x; FLAGS(a); break;
        case 0x98: a = y; FLAGS(a); break;
        case 0xBA: x = sp; FLAGS(x); break;
        case 0x9A: sp = x; break;
        case 0xE8: x = (x + 1) & 255; FLAGS(x); break;
        case 0xCA: x = (x - 1) & 255; FLAGS(x); break;
        case 0xC8: y = (y + 1) & 255; FLAGS(y); break;
        case 0x88: y = (y - 1) & 255; FLAGS(y); break;
        case 0xEA: break;
        default: s->jammed = 1;
        }
    }
    s->clock = clock;
    s->a = (uint8_t)a, s->x = (uint8_t)x, s->y = (uint8_t)y, s->s = (uint8_t)sp, s->p = (uint8_t)PACK();
    s->pc = (uint16_t)pc;
}

/* What the picture unit does to its address after a line: the next line, from the left. */
static void next_line(State *s) {
    if (!rendering(s)) return;
    unsigned v = s->v;
    if ((v & 0x7000) != 0x7000) {
        v += 0x1000;
    } else {
        unsigned row = v >> 5 & 31;
        v &= 0x0FFF;
        if (row == 29) row = 0, v ^= 0x800;
        else row = (row + 1) & 31;
        v = (v & ~0x3E0u) | row << 5;
    }
    s->v = (uint16_t)((v & ~0x41Fu) | (s->t & 0x41F));
}

static void run_frame(Console *c, int draw) {
    State *s = &c->state;
    int32_t end = FRAME_LINES * LINE_DOTS;
    c->sprites_listed = 0;
    c->hit_line = -1;
    s->line = -1;
    if (s->warming_up) {
        run(c, end);
        s->warming_up--;
        if (draw) memset(c->picture, 0x0F, sizeof c->picture);
    } else {
        run(c, LINE_DOTS);
        s->status |= VBLANK;
        s->sprite_address = 0;
        run(c, LINE_DOTS + 12);
        if (s->ctrl & 0x80) s->nmi = 1;
        run(c, 21 * LINE_DOTS);
        s->status &= 0x1F;
        run(c, 22 * LINE_DOTS - 16);
        if (rendering(s)) s->v = s->t;
        end -= s->short_frame;
        s->short_frame ^= 1;
        int32_t start = end - LINES * LINE_DOTS;
        run(c, start);
        for (int line = 0; line < LINES; line++, start += LINE_DOTS) {
            s->line = line;
            s->line_start = start;
            run(c, start + 256);
            if (!(s->status & SPRITE_ZERO) && find_hit(c, line) >= 0) s->status |= SPRITE_ZERO;
            if (draw) draw_line(c, line);
            next_line(s);
            run(c, start + LINE_DOTS);
        }
    }
    s->clock -= end;
    s->line = -1;
    s->line_start = 0;
}

/* Whether this machine has the instructions that the library was compiled to. */
int64_t nes_supported(void) {
#if defined(__x86_64__) && !defined(__clang__)
    return __builtin_cpu_supports("ssse3") != 0;
#else
    return 1;
#endif
}

int64_t nes_console_size(void) { return sizeof(Console); }
int64_t nes_state_size(void) { return sizeof(State); }

int64_t nes_cartridge_size(void) { return sizeof(Cartridge); }

/* Make a cartridge of 16 or 32 KB of program and 8 KB of patterns. */
void nes_make_cartridge(Cartridge *c, const uint8_t *prg, int64_t prg_size, const uint8_t *chr, int64_t vertical) {
    for (int64_t i = 0; i < 32768; i++) c->prg[i] = prg[i % prg_size];
    for (int tile = 0; tile < 512; tile++)
        for (int row = 0; row < 8; row++) {
            uint8_t low = chr[16 * tile + row], high = chr[16 * tile + 8 + row], pixels[8];
            for (int x = 0; x < 8; x++) pixels[x] = (uint8_t)((low >> (7 - x) & 1) | (high >> (7 - x) & 1) << 1);
            memcpy(&c->rows[tile >> 8][tile & 255][row], pixels, 8);
        }
    c->vertical = (uint8_t)vertical;
}

/* Turn the power on. */
void nes_power_on(Console *c, const Cartridge *cartridge) {
    memset(c, 0, sizeof *c);
    c->cartridge = cartridge;
    State *s = &c->state;
    memset(s->ram, 0xFF, sizeof s->ram);
    s->line = -1;
    s->s = 0xFD;
    s->p = IRQ_OFF | UNUSED;
    s->pc = (uint16_t)(cartridge->prg[0x7FFC] | cartridge->prg[0x7FFD] << 8);
    s->warming_up = 1;
    c->before = *s;
}

/* Run one frame. If it is not drawn now, nes_picture draws it when it is needed. Returns whether the program jammed. */
int64_t nes_step(Console *c, int64_t buttons, int64_t draw) {
    c->state.buttons = (uint8_t)buttons;
    c->before = c->state;
    run_frame(c, (int)draw);
    c->drawn = (uint8_t)draw;
    return c->state.jammed;
}

/* Copy the colours of the last frame, without its border: SHOWN_LINES rows of SHOWN_WIDTH numbers below 64. */
void nes_picture(Console *c, uint8_t *out) {
    if (!c->drawn) {
        State now = c->state;
        c->state = c->before;
        run_frame(c, 1);
        c->state = now;
        c->drawn = 1;
    }
    for (int line = 0; line < SHOWN_LINES; line++)
        memcpy(out + line * SHOWN_WIDTH, c->picture[TOP + line] + LEFT, SHOWN_WIDTH);
}

void nes_ram(const Console *c, uint8_t *out) { memcpy(out, c->state.ram, sizeof c->state.ram); }
void nes_write(Console *c, int64_t address, int64_t value) { c->state.ram[address & 0x7FF] = (uint8_t)value; }
void nes_save(const Console *c, uint8_t *out) { memcpy(out, &c->state, sizeof c->state); }

void nes_load(Console *c, const uint8_t *data) {
    memcpy(&c->state, data, sizeof c->state);
    c->before = c->state;
    c->drawn = 0;
}

/* Downsample the brighter of two pictures, pixel by pixel and colour by colour, to 84×84 pixels: 8 lines become 3, 20 columns 7.

   `luma` has the brightness of every pair of colours, at most 256·255. Sums are exact in float32. */
void nes_grey(const uint8_t *one, const uint8_t *two, const uint16_t *luma, uint8_t *out) {
    /* Of 20 columns, each 7 parts wide, an output has 20 parts: from which column on, and how much of each. */
    static const uint8_t first[7] = {0, 2, 5, 8, 11, 14, 16};
    static const uint8_t parts[7][4] = {{7, 7, 6, 0}, {1, 7, 7, 5}, {2, 7, 7, 4}, {3, 7, 7, 3},
                                        {4, 7, 7, 2}, {5, 7, 7, 1}, {0, 6, 7, 7}};
    for (int group = 0; group < SHOWN_LINES / 8; group++) {
        uint16_t lines[8][SHOWN_WIDTH];
        uint32_t sums[3][SHOWN_WIDTH];
        const uint8_t *from = one + group * 8 * SHOWN_WIDTH, *other = two + group * 8 * SHOWN_WIDTH;
        for (int row = 0; row < 8; row++, from += SHOWN_WIDTH, other += SHOWN_WIDTH)
            for (int x = 0; x < SHOWN_WIDTH; x++) lines[row][x] = luma[from[x] << 6 | other[x]];
        for (int x = 0; x < SHOWN_WIDTH; x++) {
            uint32_t third = lines[2][x], sixth = lines[5][x];
            sums[0][x] = 3u * ((uint32_t)lines[0][x] + lines[1][x]) + 2 * third;
            sums[1][x] = 3u * ((uint32_t)lines[3][x] + lines[4][x]) + third + sixth;
            sums[2][x] = 3u * ((uint32_t)lines[6][x] + lines[7][x]) + 2 * sixth;
        }
        for (int i = 0; i < 3; i++)
            for (int block = 0; block < SHOWN_WIDTH / 20; block++)
                for (int j = 0; j < 7; j++) {
                    const uint32_t *columns = sums[i] + 20 * block + first[j];
                    uint32_t sum = parts[j][0] * columns[0] + parts[j][1] * columns[1] + parts[j][2] * columns[2] +
                                   parts[j][3] * columns[3];
                    *out++ = (uint8_t)((float)sum * (float)(1.0 / (8 * 20 * 256)) + 0.5f);
                }
    }
}
