// A unit of a head as float32: four elements where head_dim allows (HEAD_UNIT4), else two.
//#if HEAD_UNIT4
alias HeadValue = vec4<f32>;
//#else
alias HeadValue = vec2<f32>;
//#endif
